"""A row's place is where the user finds the row in their data, whatever was left out, drawn or repeated on the way."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dataset_files import load, make_row, questions, write_json, write_lines, write_parquet

from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows

TEXTS = [f"{number} + 1?" for number in range(12)]


def text_at(place: str) -> str:
    """The question at a place, read without the code that reads data."""
    path, unit, number = re.fullmatch(r"(.*) (line|row) (\d+)", place).groups()  # type: ignore[union-attr]
    if unit == "line":
        row = json.loads(Path(path).read_text().split("\n")[int(number) - 1])
    elif path.endswith(".json"):
        row = json.loads(Path(path).read_text())[int(number) - 1]
    else:
        import pyarrow.parquet as pq

        row = pq.read_table(path).to_pylist()[int(number) - 1]
    return row["messages"][0]["content"]


def assert_places_are_right(data: PromptDataset) -> None:
    assert [text_at(row.place) for row in data] == questions(data)


WRITERS: list[tuple[str, Callable[..., str]]] = [
    ("d.jsonl", write_lines),
    ("d.json", write_json),
    ("d.parquet", write_parquet),
]


@pytest.mark.parametrize("amount", ["1.0", "0.5", "5", "2.5", "30"])
@pytest.mark.parametrize(("file", "write"), WRITERS)
def test_places_are_those_of_the_file(tmp_path: Path, file: str, write: Callable[..., str], amount: str) -> None:
    rows = [make_row(text) for text in TEXTS]
    rows[3] = make_row("x" * 300)  # too long
    held_out = load(write_lines(tmp_path / "eval.jsonl", [rows[0], rows[6]]), "1.0")
    data = load(write(tmp_path / file, rows), amount, exclude=held_out, overlong_prompts="drop")
    assert len(data) >= 2
    assert_places_are_right(data)


def test_empty_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n" + "\n\n".join(json.dumps(make_row(text)) for text in TEXTS) + "\n")
    data = load(str(path), "1.0")
    assert data[0].place == f"{path} line 3"
    assert_places_are_right(data)


def test_rows_of_several_sources_know_their_source(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "plus.jsonl", [make_row(text) for text in TEXTS[:2]])
    other = write_parquet(tmp_path / "minus.parquet", [make_row(text) for text in TEXTS[2:4]])
    entry = "reasoning_gym/chain_sum?size=2&seed=7"
    data = load(one, "1.0", other, "1.0", entry, "1.0")
    assert [row.place for row in data] == [
        f"{one} line 1",
        f"{one} line 2",
        f"{other} row 1",
        f"{other} row 2",
        f"{entry} index 0",
        f"{entry} index 1",
    ]
    assert [data.places.source_of(row) for row in range(6)] == [one, one, other, other, entry, entry]
    assert questions(data)[5] == reasoning_gym_rows(entry)[1]["messages"][0]["content"]


def test_rows_of_a_data_set_with_splits_name_the_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", [make_row(f"{split} 1"), make_row(f"{split} 2")])
    data = load(str(tmp_path), "1.0", splits=("test",))
    assert [(row.place, text) for row, text in zip(data, questions(data), strict=True)] == [
        (f"{tmp_path} (split test) row 1", "test 1"),
        (f"{tmp_path} (split test) row 2", "test 2"),
    ]


def test_places_survive_a_file(tmp_path: Path) -> None:
    data = load(write_lines(tmp_path / "d.jsonl", [make_row(text) for text in TEXTS]), "0.5")
    np.savez(tmp_path / "d.npz", **data.arrays())  # type: ignore[arg-type]
    again = PromptDataset.from_arrays(np.load(tmp_path / "d.npz"))
    assert [row.place for row in again] == [row.place for row in data]
    assert_places_are_right(again)


def test_the_identity_of_data_is_as_before_rows_had_places(tmp_path: Path) -> None:
    """A checkpoint of an earlier version goes on with the same data, in any directory."""
    data = load(
        write_lines(tmp_path / "d.jsonl", [make_row(f"{i} + 1?", ground_truth=str(i + 1)) for i in range(7)]), "2.0"
    )
    assert data.fingerprint() == {
        "rows": 14,
        "prompts": "39dd551478404d99",
        "ground_truths": "8817e93dc7751abe",
        "verifiers": "4993279b0280e1af",
    }
