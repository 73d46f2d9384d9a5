"""Where a row stands in the user's data: file and line, so that the row can be looked up there."""

import json
from array import array
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class PlaceInSource(NamedTuple):
    """A row's place in its source, such as `line 7`. It does not depend on which rows of the source are used."""

    unit: str
    """`line` in a file of JSON lines; `row` in a JSON array, a parquet file, or a data set; `index` in a reasoning-gym task."""
    number: int
    """Lines and rows are counted from 1. Indices are counted from 0, as in `dataset[0]`."""

    def __str__(self) -> str:
        return f"{self.unit} {self.number}"


class RowPlaces:
    """The place of each row of a dataset: `train.jsonl line 7`. A row takes 6 bytes."""

    def __init__(self, *, source_of_row: np.ndarray, numbers: np.ndarray, sources: tuple[tuple[str, str], ...]) -> None:
        self._source_of_row = source_of_row  # (rows,) uint16
        self._numbers = numbers  # (rows,) uint32
        self._sources = sources  # name and unit of each source

    def __getitem__(self, row: int) -> str:
        name, unit = self._sources[self._source_of_row[row]]
        return f"{name} {PlaceInSource(unit, int(self._numbers[row]))}"

    def source_of(self, row: int) -> str:
        """The name of the file, data set or task that a row comes from."""
        return self._sources[self._source_of_row[row]][0]

    def arrays(self) -> dict[str, np.ndarray]:
        """The places as plain arrays, for a file; `from_arrays` reads them again."""
        names = np.frombuffer(json.dumps(self._sources).encode(), dtype=np.uint8)
        return {
            "places.source_of_row": self._source_of_row,
            "places.numbers": self._numbers,
            "places.sources": names,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "RowPlaces":
        """Raises `KeyError` or `ValueError` if the arrays hold no places."""
        sources = json.loads(arrays["places.sources"].tobytes())
        return cls(
            source_of_row=arrays["places.source_of_row"],
            numbers=arrays["places.numbers"],
            sources=tuple((name, unit) for name, unit in sources),
        )


class RowPlacesBuilder:
    """Collects the places of rows."""

    def __init__(self) -> None:
        self._source_of_row, self._numbers = array("H"), array("I")
        self._sources: dict[tuple[str, str], int] = {}

    def add(self, source: str, place: PlaceInSource) -> None:
        self._source_of_row.append(self._sources.setdefault((source, place.unit), len(self._sources)))
        self._numbers.append(place.number)

    def add_again(self, row: int) -> None:
        """The same place once more, for a copy of a row."""
        self._source_of_row.append(self._source_of_row[row])
        self._numbers.append(self._numbers[row])

    def build(self) -> RowPlaces:
        """The places, which use the memory of the builder. The builder must not be used afterwards."""
        return RowPlaces(
            source_of_row=np.frombuffer(self._source_of_row, np.uint16) if self._numbers else np.zeros(0, np.uint16),
            numbers=np.frombuffer(self._numbers, np.uint32) if self._numbers else np.zeros(0, np.uint32),
            sources=tuple(self._sources),
        )
