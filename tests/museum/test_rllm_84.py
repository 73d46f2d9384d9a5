"""A large parquet file with nested columns cannot be loaded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exhibit import Exhibit

from open_instruct.data import sources

EXHIBIT = Exhibit(
    reports=("rllm-org/rllm #84", "huggingface/datasets #7793", "verl-project/verl #4112", "verl-project/verl #3388"),
    subject="data",
    happened="A file was read as one table. pyarrow has to divide a large column, and cannot put nested values together "
    "again, so rows with messages and a struct of further values failed to load as soon as there were enough of "
    "them.",
    here="A local file is read in batches of 1,000 rows, so that no column is large (`data/sources.py`). Directories "
    "and data sets of the hub are loaded by `datasets`; an error there is told in one message, with the name, "
    "before anything starts.",
)
MOST_ROWS = 1000
"""Rows that a nested column may have here before it counts as too large for one table."""
NUM_ROWS = 2500
Row = dict[str, Any]


def row(number: int) -> Row:
    return {
        "messages": [{"role": "user", "content": f"{number} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": [str(number + 1)]},
        "extra_info": None if number % 3 else {"index": number, "tags": ["a", None]},
    }


class TooLarge(Exception):
    """As pyarrow's error: a nested column of so many rows is divided."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of nested rows, and a pyarrow that cannot read many of them at once."""
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([row(number) for number in range(NUM_ROWS)]), path)
    of_file = pq.ParquetFile.iter_batches

    def iter_batches(parquet: pq.ParquetFile, batch_size: int = 2**16, **options: Any) -> Iterator[pa.RecordBatch]:
        if batch_size > MOST_ROWS:
            raise TooLarge
        return of_file(parquet, batch_size=batch_size, **options)

    def read_table(source: Path) -> pa.Table:
        return pa.Table.from_batches(pq.ParquetFile(source).iter_batches())

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr(pq, "read_table", read_table)
    return path


def check(rows_of: Callable[[Path], list[Row]], path: Path) -> None:
    assert rows_of(path) == [row(number) for number in range(NUM_ROWS)]


def theirs(path: Path) -> list[Row]:
    return pq.read_table(path).to_pylist()


def ours(path: Path) -> list[Row]:
    return [raw.values for raw in sources.iter_rows(str(path), "train", None, None)]


def test_file_as_one_table_is_caught(file: Path) -> None:
    with pytest.raises(TooLarge):
        check(theirs, file)


def test_nested_rows_are_read_in_batches_here(file: Path) -> None:
    check(ours, file)
