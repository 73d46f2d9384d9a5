"""Files, directories, names of the hub and reasoning-gym tasks: what is read of them, and what is wrong with them."""

import codecs
import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import (
    OPTIONS,
    load,
    make_row,
    mistakes_of,
    questions,
    write_json,
    write_lines,
    write_parquet,
)

from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.sources import iter_rows
from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows


def test_reasoning_gym() -> None:
    entry = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=40&seed=7"
    data = load(entry, "1.0")
    rows = reasoning_gym_rows(entry)
    assert questions(data) == [row["messages"][0]["content"] for row in rows]
    assert [row.ground_truth for row in data] == [row["ground_truth"] for row in rows]
    assert data.dataset_names == ("reasoning_gym/chain_sum",)
    assert "nearest: chain_sum" in mistakes_of("reasoning_gym/chain_sun", "1.0")[0]


ROWS = [
    make_row("a", ground_truth="1"),
    make_row("é", ground_truth="2", dataset="string_matcher"),
    make_row("c", ground_truth="3", dataset="reasoning_gym/x"),
]


@pytest.mark.parametrize(
    ("file", "write"),
    [("d.jsonl", write_lines), ("d.json", write_lines), ("d.json", write_json), ("d.parquet", write_parquet)],
)
def test_local_files(tmp_path: Path, file: str, write: Any) -> None:
    data = load(write(tmp_path / file, ROWS), "1.0", check_label=None)
    assert questions(data) == ["a", "é", "c"]
    assert [row.ground_truth for row in data] == ["1", "2", "3"]
    assert [row.dataset for row in data] == ["gsm8k", "string_matcher", "reasoning_gym/x"]
    assert data[1].prompt.tolist() == list("user:é\nassistant:".encode())


NESTED = {
    "list": (pa.list_(pa.float32()), [0.1, None]),
    "fixed_list": (pa.list_(pa.float32(), 2), [0.1, 0.2]),
    "half": (pa.large_list(pa.float16()), [0.1]),
    "struct": (
        pa.struct({"ground_truth": pa.float32(), "style": pa.string()}),
        {"ground_truth": 0.1, "style": "rule"},
    ),
    "deep": (pa.list_(pa.struct({"values": pa.list_(pa.float32())})), [{"values": [0.1]}, {"values": None}, None]),
    "map": (pa.map_(pa.string(), pa.float32()), [("a", 0.1)]),
    "double": (pa.list_(pa.float64()), [0.1]),
    "wide": (pa.float32(), 1e20),
    "none": (pa.struct({"ground_truth": pa.float32()}), None),
}


@pytest.mark.parametrize("column", NESTED)
def test_short_floats_of_any_depth_are_those_that_were_written(tmp_path: Path, column: str) -> None:
    """Else the label of a row is 0.10000000149011612, and no response matches it."""
    kind, value = NESTED[column]
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows/train.parquet"
    pq.write_table(pa.table({column: pa.array([value], kind)}), file)
    (row,) = iter_rows(str(file), "train", None, None)
    assert row.values == {column: value}
    if column not in ("map", "half"):  # `datasets` has no such lists
        (row,) = iter_rows(str(tmp_path / "rows"), "train", None, str(tmp_path / "cache"))
        assert row.values == {column: value}


README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
"""


@pytest.fixture
def hub_layout(tmp_path: Path) -> Path:
    """A directory as a dataset repository on the hub is laid out."""
    root = tmp_path / "rlvr"
    write_parquet(root / "data/train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(root / "data/train-00001-of-00002.parquet", ROWS[2:])
    write_parquet(root / "data/test-00000-of-00001.parquet", [make_row("t")])
    (root / "README.md").write_text(README)
    return root


def test_hub_layout(hub_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    options: dict[str, Any] = {"check_label": None, "cache_dir": str(cache)}
    assert questions(load(str(hub_layout), "1.0", **options)) == ["a", "é", "c"]
    assert questions(load(str(hub_layout), "1.0", splits=("test",), **options)) == ["t"]
    assert any(cache.iterdir())
    monkeypatch.chdir(hub_layout.parent)
    assert questions(load("rlvr", "2", **options)) == ["a", "é"]
    mistake = mistakes_of("rlvr", "1.0", splits=("dev",), **options)[0]
    assert mistake.startswith("rlvr: this directory could not be loaded, split 'dev'")
    assert "['train', 'test']" in mistake
    mistake = mistakes_of("rlvr", "1.0", ground_truths_key="answer", **options)[0]
    assert mistake.startswith("rlvr: has no column answer; it has: messages, ground_truth, dataset")


@pytest.mark.parametrize(
    ("file", "broken", "cause"),
    [
        ("d.jsonl", b'{"messages": [{"role": "us', "ArrowInvalid: JSON parse error"),
        ("d.jsonl", b'{"messages": "\xff\xfe"}', "utf-8"),
        ("d.json", b'{"messages": [{"role": "us', "ArrowInvalid: JSON parse error"),
    ],
)
def test_a_broken_line_in_a_directory_is_named_with_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, broken: bytes, cause: str
) -> None:
    root = tmp_path / "rows"
    (root / "about").mkdir(parents=True)
    write_lines(root / "a.jsonl" if file == "d.jsonl" else root / "a.json", [make_row()])
    (root / "about" / "of.json").write_text('{\n  "note": "this is no data, and not broken"\n}')
    good = json.dumps(make_row()).encode()
    (root / file).write_bytes(b"\n".join([good] * 64 + [broken] + [good] * 9))
    (root / "README.md").write_text(f'---\nconfigs:\n- config_name: default\n  data_files: "*.{file[2:]}"\n---\n')
    (mistake,) = mistakes_of(str(root), "1.0", cache_dir=str(tmp_path / "cache"))
    assert mistake.startswith(f"{root}: this directory could not be loaded, split 'train': ")
    assert cause in mistake
    assert f"({root / file} line 65: broken JSON: " in mistake
    assert "examples/s" not in capfd.readouterr().err, "no progress bars"


def test_the_cause_is_told_where_no_line_is_broken(tmp_path: Path) -> None:
    rows = [make_row() for _ in range(10)]
    (tmp_path / "rows").mkdir()
    write_lines(tmp_path / "rows" / "a.jsonl", rows)
    write_lines(tmp_path / "rows" / "b.jsonl", [*rows, make_row(messages="text")])
    (mistake,) = mistakes_of(str(tmp_path / "rows"), "1.0", cache_dir=str(tmp_path / "cache"))
    assert "DatasetGenerationError: An error occurred while generating the dataset: TypeError: Couldn't cast" in mistake


def test_progress_bars_are_as_before_once_a_directory_is_read(hub_layout: Path, tmp_path: Path) -> None:
    import datasets

    for switch in (datasets.disable_progress_bars, datasets.enable_progress_bars):
        switch()
        before = datasets.are_progress_bars_disabled()
        load(str(hub_layout), "1.0", check_label=None, cache_dir=str(tmp_path / str(before)))
        assert datasets.are_progress_bars_disabled() is before


def test_a_configuration_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "sets"
    for name, row in (("main", "m"), ("socratic", "s")):
        write_parquet(root / f"{name}/train.parquet", [make_row(row)])
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.parquet\n"
        for name in ("main", "socratic")
    )
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    options: dict[str, Any] = {"check_label": None, "cache_dir": str(tmp_path / "cache")}
    assert questions(load(f"{root}?config=main", "1.0", **options)) == ["m"]
    assert questions(load(f"{root}?config=socratic", "1.0", **options)) == ["s"]
    mistake = mistakes_of(str(root), "1.0", **options)[0]
    assert "['main', 'socratic']" in mistake
    assert f"named like {root}?config=main" in mistake
    mistake = mistakes_of(f"{root}?config=other", "1.0", **options)[0]
    assert "configuration 'other'" in mistake
    assert "names no configuration" in mistakes_of(f"{root}?config=", "1.0", **options)[0]
    file = root / "main" / "train.parquet"
    assert "a file has no configurations" in mistakes_of(f"{file}?config=main", "1.0", **options)[0]


def test_hub_names_without_a_hub_are_a_mistake_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")
    start = time.monotonic()
    mistake = mistakes_of("nobody/nothing", "1.0", cache_dir=str(tmp_path))[0]
    assert mistake.startswith("nobody/nothing: no file or directory here, and as a hub name it could not be loaded")
    assert time.monotonic() - start < 10
    assert datasets.config.HF_HUB_OFFLINE is False, "as it was before"


def test_who_is_offline_by_choice_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", None)
    assert "OfflineModeIsEnabled" in mistakes_of("nobody/nothing", "1.0", cache_dir=str(tmp_path))[0]


def test_several_sources_in_order(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [make_row("a"), make_row("b")])
    two = write_parquet(tmp_path / "two.parquet", [make_row("c"), make_row("d")])
    data, report = load_prompts([one, "1.0", two, "1"], ["train"], **OPTIONS)
    assert questions(data) == ["a", "b", "c"]
    assert [(source.name, source.num_rows, source.num_kept) for source in report.sources] == [(one, 2, 2), (two, 1, 1)]
    assert (report.num_rows, report.num_overlong, report.num_excluded) == (3, 0, 0)


def test_rows_of_files_without_lines_are_numbered(tmp_path: Path) -> None:
    rows = [make_row(), make_row(dataset="x")]
    for name in (write_parquet(tmp_path / "d.parquet", rows), write_json(tmp_path / "d.json", rows)):
        assert mistakes_of(name, "1.0")[0].startswith(f"{name} row 2: unknown verifier")


def test_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    good = json.dumps(make_row()).encode()
    path.write_bytes(b"\n".join([good, b"", good[:-5], b"[1]", b"\xff\xfe", b"[" * 100_000, good]))
    mistakes = mistakes_of(str(path), "1.0")
    assert [mistake.removeprefix(str(path)).split(":")[:2] for mistake in mistakes] == [
        [" line 3", " broken JSON"],
        [" line 4", " a row must be a JSON object, got list"],
        [" line 5", " broken JSON"],
        [" line 6", " broken JSON"],
    ]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("d.jsonl", b"", "has no rows"),
        ("d.jsonl", b"\n\n", "has no rows"),
        ("d.json", b"", "has no rows"),
        ("d.json", b"[]", "has no rows"),
        ("d.json", b"[{", "broken JSON"),
        ("d.json", b"[1]", "row 1: a row must be a JSON object, got int"),
        ("d.parquet", b"", "not a readable parquet file"),
        ("d.parquet", b"PAR1 or so", "not a readable parquet file"),
        ("d.csv", b"a,b", "the name of a data file must end in one of .jsonl, .json, .parquet"),
    ],
)
def test_files_of_no_use(tmp_path: Path, file: str, content: bytes, problem: str) -> None:
    (tmp_path / file).write_bytes(content)
    (mistake,) = mistakes_of(str(tmp_path / file), "1.0")
    assert problem in mistake
    assert mistake.startswith(str(tmp_path / file))


def test_missing_files(tmp_path: Path) -> None:
    assert mistakes_of("no.jsonl", "1.0") == [f"no.jsonl: there is no such file (looked in {Path.cwd()})"]
    assert mistakes_of(f"{tmp_path}/no", "1.0") == [f"{tmp_path}/no: there is no such file or directory"]


def test_parquet_with_broken_text_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"messages": broken, "ground_truth": ["2"], "dataset": ["gsm8k"]}), tmp_path / "d.parquet")
    [mistake] = mistakes_of(str(tmp_path / "d.parquet"), "1.0")
    assert "d.parquet: not a readable parquet file" in mistake


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8, b"\n\n ", codecs.BOM_UTF8 + b"\n"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("file", ["d.jsonl", "d.json"])
def test_json_array_is_read_in_a_file_of_either_name(
    tmp_path: Path, file: str, indent: int | None, mark: bytes
) -> None:
    rows = [make_row("a"), make_row("b")]
    (tmp_path / file).write_bytes(mark + json.dumps(rows, indent=indent).encode())
    assert questions(load(str(tmp_path / file), "1.0")) == ["a", "b"]
    (tmp_path / file).write_bytes(mark + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    assert questions(load(str(tmp_path / file), "1.0")) == ["a", "b"]


def test_file_that_is_no_array_and_no_lines_names_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"[1, 2]\n" + json.dumps(make_row()).encode())
    assert mistakes_of(str(tmp_path / "d.jsonl"), "1.0") == [
        f"{tmp_path}/d.jsonl line 1: a row must be a JSON object, got list"
    ]
    (tmp_path / "d.jsonl").write_bytes(json.dumps([make_row(), 3]).encode())
    assert mistakes_of(str(tmp_path / "d.jsonl"), "1.0") == [
        f"{tmp_path}/d.jsonl row 2: a row must be a JSON object, got int"
    ]
    (tmp_path / "d.jsonl").write_bytes(json.dumps(make_row()).encode("utf-16"))
    assert mistakes_of(str(tmp_path / "d.jsonl"), "1.0") == [
        f"{tmp_path}/d.jsonl: is written in UTF-16. Save it as UTF-8"
    ]
