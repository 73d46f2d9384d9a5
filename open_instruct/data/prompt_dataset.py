"""Prompts as rows of token ids in a few flat arrays."""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from open_instruct.data.row_places import PlaceInSource, RowPlaces, RowPlacesBuilder


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to be issued."""

    prompt: np.ndarray  # (Q,) int32
    ground_truth: object
    """The value with which the verifier compares a response: any JSON value."""
    dataset: str
    """Value of the `dataset` column, which names the verifier. Several are joined by ` + `, and `ground_truth` is a list."""
    raw_query: str
    """The prompt's text with the chat template applied; with the reasoning cache, only the problem."""
    facts: dict[str, Any] | None = None
    """What the workflow has read from the row (`Workflow.row_facts`), and the row's `messages`. None: it reads nothing."""
    columns: dict[str, Any] | None = None
    """What reward functions get: the row's columns, and as `prompt` its text or messages. None: the run has no such functions."""
    place: str = ""
    """Where the row stands in the user's data, such as `train.jsonl line 7`."""


@dataclass(frozen=True)
class _Ragged:
    """Rows of different lengths in one array: row `i` is `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


class PromptDataset:
    """A sequence of `PromptRow`.

    A row takes 4 bytes per token plus the bytes of its texts. The dataset pickles as fourteen arrays, which Ray shares
    between processes without a copy.
    """

    def __init__(
        self,
        *,
        prompts: _Ragged,
        ground_truths: _Ragged,
        raw_queries: _Ragged,
        facts: _Ragged,
        columns: _Ragged,
        column_names: tuple[str, ...],
        dataset_of_row: np.ndarray,
        dataset_names: tuple[str, ...],
        places: RowPlaces,
        entry_ends: np.ndarray,
    ) -> None:
        self._prompts = prompts  # int32
        self._ground_truths = ground_truths  # uint8: JSON
        self._raw_queries = raw_queries  # uint8: UTF-8
        self._facts = facts  # uint8: JSON, or nothing
        self._columns = columns  # uint8: JSON, or nothing; no rows at all if no row has columns
        self.column_names = column_names
        """The columns that any row has for reward functions."""
        self._dataset_of_row = dataset_of_row  # (rows,) int32
        self._dataset_names = dataset_names
        self.places = places
        self._entry_ends = entry_ends  # (entries,) int64

    def arrays(self) -> dict[str, np.ndarray]:
        """The dataset as plain arrays, for a file; `from_arrays` reads them again."""
        ragged = {
            "prompts": self._prompts,
            "ground_truths": self._ground_truths,
            "raw_queries": self._raw_queries,
            "facts": self._facts,
            "columns": self._columns,
        }
        return {
            **{f"{name}.values": rows.values for name, rows in ragged.items()},
            **{f"{name}.offsets": rows.offsets for name, rows in ragged.items()},
            "dataset_of_row": self._dataset_of_row,
            "dataset_names": _as_array(self._dataset_names),
            "column_names": _as_array(self.column_names),
            "entry_ends": self._entry_ends,
            **self.places.arrays(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "PromptDataset":
        """The dataset from its arrays. Raises `KeyError` or `ValueError` if the arrays are not a dataset's."""

        def ragged(name: str) -> _Ragged:
            return _Ragged(arrays[f"{name}.values"], arrays[f"{name}.offsets"])

        return cls(
            prompts=ragged("prompts"),
            ground_truths=ragged("ground_truths"),
            raw_queries=ragged("raw_queries"),
            facts=ragged("facts"),
            columns=ragged("columns"),
            column_names=tuple(json.loads(arrays["column_names"].tobytes())),
            dataset_of_row=arrays["dataset_of_row"],
            dataset_names=tuple(json.loads(arrays["dataset_names"].tobytes())),
            places=RowPlaces.from_arrays(arrays),
            entry_ends=arrays["entry_ends"],
        )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, row: int) -> PromptRow:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return PromptRow(
            prompt=self._prompts[row],
            ground_truth=json.loads(self._ground_truths[row].tobytes()),
            dataset=self.dataset_of(row),
            raw_query=self._raw_queries[row].tobytes().decode(),
            facts=json.loads(self._facts[row].tobytes()) if len(self._facts[row]) else None,
            columns=self._columns_of(row),
            place=self.places[row],
        )

    def _columns_of(self, row: int) -> dict[str, Any] | None:
        if not len(self._columns):
            return None
        data = self._columns[row].tobytes()
        return json.loads(data) if data else None

    def dataset_of(self, row: int) -> str:
        """The `dataset` of a row, without reading the rest of the row."""
        return self._dataset_names[self._dataset_of_row[row]]

    def entry_of(self, row: int) -> int:
        """The number, from 0, of the entry of the mixer list that a row comes from."""
        return int(np.searchsorted(self._entry_ends, row, side="right"))

    def rows_of_entry(self, entry: int) -> range:
        """The rows of an entry of the mixer list, which lie side by side."""
        return range(int(self._entry_ends[entry - 1]) if entry else 0, int(self._entry_ends[entry]))

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[row] for row in range(len(self)))

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Every value of the `dataset` column, in order of appearance."""
        return self._dataset_names

    def first_rows(self) -> Iterator[PromptRow]:
        """The first row with each value of the `dataset` column."""
        _, rows = np.unique(self._dataset_of_row, return_index=True)
        return (self[int(row)] for row in rows)

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt, in tokens."""
        return int(np.diff(self._prompts.offsets).max(initial=0))

    def fingerprint(self) -> dict[str, int | str]:
        """The number of rows, and hashes of all prompts, all ground truths, all verifiers and, if there are reward functions, of
        all columns, in order. As JSON values.
        The places of the rows do not count, because a file may move.

        Takes about as long as reading the arrays once: a tenth of a second for 50,000 rows of 100 tokens.
        """
        names = json.dumps(self._dataset_names).encode()
        columns = {"columns": _hash(self._columns)} if len(self._columns.values) else {}
        return {
            "rows": len(self),
            **columns,
            "prompts": _hash(self._prompts, self._raw_queries),
            "ground_truths": _hash(self._ground_truths, *([self._facts] if len(self._facts.values) else [])),
            "verifiers": hashlib.sha256(self._dataset_of_row.tobytes() + names).hexdigest()[:16],
        }

    def prompt_keys(self) -> Iterator[bytes]:
        """The token ids of each prompt as bytes, as `prompt_key` makes them."""
        return (self._prompts[row].tobytes() for row in range(len(self)))


def _as_array(names: tuple[str, ...]) -> np.ndarray:
    return np.frombuffer(json.dumps(names).encode(), dtype=np.uint8)


def _hash(*columns: _Ragged) -> str:
    """Hash of the values and of the ends of the rows, so that `ab|c` and `a|bc` have different hashes."""
    digest = hashlib.sha256()
    for column in columns:
        for array_ in (column.offsets, column.values):
            digest.update(np.ascontiguousarray(array_).data)
    return digest.hexdigest()[:16]


def prompt_key(token_ids: list[int]) -> bytes:
    """The token ids as bytes; equal prompts have equal keys."""
    return array("i", token_ids).tobytes()


class PromptDatasetBuilder:
    """Collects rows in growing flat buffers, so that a million rows never exist as Python objects."""

    def __init__(self) -> None:
        self._tokens, self._token_ends = array("i"), array("q", [0])
        self._truths, self._truth_ends = bytearray(), array("q", [0])
        self._queries, self._query_ends = bytearray(), array("q", [0])
        self._facts, self._fact_ends = bytearray(), array("q", [0])
        self._columns, self._column_ends = bytearray(), array("q", [0])
        self._column_names: dict[str, None] = {}
        self._dataset_of_row = array("i")
        self._dataset_ids: dict[str, int] = {}
        self._places = RowPlacesBuilder()
        self._entry_ends = array("q")

    def __len__(self) -> int:
        return len(self._dataset_of_row)

    def add(
        self,
        *,
        token_ids: list[int],
        ground_truth: object,
        dataset: str,
        raw_query: str,
        source: str,
        place: PlaceInSource,
        facts: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokens.extend(token_ids)
        self._token_ends.append(len(self._tokens))
        self._truths += json.dumps(ground_truth).encode()
        self._truth_ends.append(len(self._truths))
        self._queries += raw_query.encode()
        self._query_ends.append(len(self._queries))
        self._facts += b"" if facts is None else json.dumps(facts).encode()
        self._fact_ends.append(len(self._facts))
        self._columns += b"" if columns is None else json.dumps(columns).encode()
        self._column_ends.append(len(self._columns))
        self._column_names.update(dict.fromkeys(columns or ()))
        self._dataset_of_row.append(self._dataset_ids.setdefault(dataset, len(self._dataset_ids)))
        self._places.add(source, place)

    def add_again(self, row: int) -> None:
        """Add a copy of an existing row."""
        for values, ends in (
            (self._tokens, self._token_ends),
            (self._truths, self._truth_ends),
            (self._queries, self._query_ends),
            (self._facts, self._fact_ends),
            (self._columns, self._column_ends),
        ):
            values.extend(values[ends[row] : ends[row + 1]])
            ends.append(len(values))
        self._dataset_of_row.append(self._dataset_of_row[row])
        self._places.add_again(row)

    def end_entry(self) -> None:
        """The rows of an entry of the mixer list are complete. Rows after the last end are an entry too."""
        self._entry_ends.append(len(self))

    def build(self) -> PromptDataset:
        """The dataset, which uses the memory of the buffers. The builder must not be used afterwards."""
        if len(self) > (self._entry_ends[-1] if self._entry_ends else 0):
            self.end_entry()
        return PromptDataset(
            prompts=_Ragged(_view(self._tokens, np.int32), _view(self._token_ends, np.int64)),
            ground_truths=_Ragged(_view(self._truths, np.uint8), _view(self._truth_ends, np.int64)),
            raw_queries=_Ragged(_view(self._queries, np.uint8), _view(self._query_ends, np.int64)),
            facts=_Ragged(_view(self._facts, np.uint8), _view(self._fact_ends, np.int64)),
            columns=self._built_columns(),
            column_names=tuple(self._column_names),
            dataset_of_row=_view(self._dataset_of_row, np.int32),
            dataset_names=tuple(self._dataset_ids),
            places=self._places.build(),
            entry_ends=_view(self._entry_ends, np.int64),
        )

    def _built_columns(self) -> _Ragged:
        """Without reward functions there are no columns, and no offsets of columns either."""
        ends = self._column_ends if self._columns else array("q", [0])
        return _Ragged(_view(self._columns, np.uint8), _view(ends, np.int64))


def _view(buffer: array | bytearray, dtype: type[np.generic]) -> np.ndarray:
    """The buffer's memory as a read-only array."""
    view = np.frombuffer(buffer, dtype=dtype) if len(buffer) else np.zeros(0, dtype)
    view.flags.writeable = False
    return view
