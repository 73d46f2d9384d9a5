"""The numbers of `metrics.jsonl` while a run writes the file, resumes and cuts it."""

import json
import math
from pathlib import Path

from open_instruct.report.metrics_file import MetricsWriter
from open_instruct.watch.metrics_table import MetricsFile


def rows_of(file: MetricsFile) -> list[dict[str, float]]:
    table = file.table()
    columns = {name: table.column(name) for name in table.names()}
    return [
        {name: column[at] for name, column in columns.items() if not math.isnan(column[at])}
        for at in range(len(table.steps))
    ]


def rows_in(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in rows]


def test_table_follows_a_file_that_grows_and_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert rows_of(file) == []
    writer = MetricsWriter(path)
    for step in range(1, 8):
        writer.write(
            step,
            {"reward": step / 3, "hist": {"edges": [1, 2], "counts": [1]}, "nan": math.nan, "only": 1.0}
            if step == 4
            else {"reward": 1.0},
        )
        assert rows_of(file) == rows_in(path)
        if step % 2:
            writer.add(step, {"eval/scores": 0.5, "eval/more": step})
            assert rows_of(file) == rows_in(path)
    assert file.table().value("eval/scores", 3) == 0.5
    assert (
        file.table().value("eval/scores", 4)
        is file.table().value("absent", 3)
        is file.table().value("reward", 9)
        is None
    )


def test_table_leaves_out_a_torn_row_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"training_step": 1, "reward": 1.5}\n'
    file = MetricsFile(path)
    for end in (5, len(line) - 1):
        path.write_bytes(line + line[:end])
        assert rows_of(file) == [{"training_step": 1, "reward": 1.5}]
    path.write_bytes(line * 2)
    assert len(rows_of(file)) == 2


def test_table_of_a_resumed_run_has_its_rows_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file, writer = MetricsFile(path), MetricsWriter(path)
    for step in range(1, 8):
        writer.write(step, {"reward": float(step), "first_start": 1.0})
    assert len(rows_of(file)) == 7
    writer.truncate_after(3)
    for step in range(4, 12):  # more than before, so that the file is longer than it was
        writer.write(step, {"reward": 10.0 * step})
    assert rows_of(file) == rows_in(path)
    assert file.table().steps == list(range(1, 12))


def test_table_of_a_run_that_wrote_the_same_bytes_anew_is_right(tmp_path: Path) -> None:
    """The last row that was read is at its place, but a row before it is another."""
    path = tmp_path / "metrics.jsonl"
    file, writer = MetricsFile(path), MetricsWriter(path)
    for step in range(1, 6):
        writer.write(step, {"a_long_name_that_fills_the_beginning_of_the_row": 1, "reward": 1.5})
    rows_of(file)
    writer.truncate_after(2)
    for step in range(3, 7):
        writer.write(step, {"a_long_name_that_fills_the_beginning_of_the_row": 1, "reward": 2.5})
    assert rows_of(file) == rows_in(path)


def test_table_of_a_new_file_at_the_same_place_is_that_file(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"training_step": 1, "old": 1}\n{"training_step": 2, "old": 1}\n')
    file = MetricsFile(path)
    rows_of(file)
    other.write_text('{"training_step": 1, "new": 1}\n{"training_step": 2, "new": 1}\n')
    other.replace(path)
    assert rows_of(file) == [{"training_step": 1, "new": 1}, {"training_step": 2, "new": 1}]


def test_table_that_a_thread_reads_stays_as_it_was_while_another_thread_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file, writer = MetricsFile(path), MetricsWriter(path)
    writer.write(1, {"reward": 1.0})
    table = file.table()
    column = table.column("reward")
    for step in range(2, 300):
        writer.write(step, {"reward": float(step), f"metric {step}": 1.0})
        assert len(file.table().steps) == step
    assert (table.steps, list(column), table.names()) == ([1], [1.0], ["training_step", "reward"])
