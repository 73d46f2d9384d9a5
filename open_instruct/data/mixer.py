"""Reads a mixer list: `[name, amount, name, amount, …]`, and a split for each name."""

from collections.abc import Sequence

import numpy as np

MOST_MISTAKES_SHOWN = 20
MOST_ROWS = 10**12
Amount = int | float
"""How many rows of a source are used: an int is their number, a float their fraction."""
MOST_REPEATS = 10_000
SEED_OF_SUBSETS = 42
"""As in open-instruct, so that the same fraction of a dataset is the same rows."""


class DatasetError(ValueError):
    """All mistakes in the data, in one message."""


class Mistakes:
    """Collects mistakes, so that the user reads all of them at once."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []
        self._alike: dict[tuple[str, str], tuple[int, int]] = {}
        """By source and problem of a row: which of `_shown` tells it, and how many other rows of the source have it."""

    def add(self, mistake: str) -> None:
        self.count += 1
        if len(self._shown) < MOST_MISTAKES_SHOWN:
            self._shown.append(mistake)

    def add_row(self, source: str, place: str, problem: str) -> None:
        """A row with a problem. Further rows of the source with the same problem are counted where the first is told."""
        if (source, problem) in self._alike:
            number, others = self._alike[source, problem]
            self._alike[source, problem] = number, others + 1
            return
        if len(self._shown) < MOST_MISTAKES_SHOWN:
            self._alike[source, problem] = len(self._shown), 0
        self.add(f"{source} {place}: {problem}")

    def raise_any(self) -> None:
        """Raises `DatasetError` if there are any mistakes."""
        if not self.count:
            return
        told = list(self._shown)
        for number, others in self._alike.values():
            told[number] += f" The same holds for {others} more row{'s' * (others > 1)}." if others else ""
        more = [f"and {self.count - len(self._shown)} more"] if self.count > len(self._shown) else []
        raise DatasetError("\n".join(told + more))


def parse_mixer_list(mixer_list: Sequence[str], flag: str = "--dataset_mixer_list") -> list[tuple[str, Amount]]:
    """`[name, amount, name, amount, …]` as pairs. The amount `0.5` is half of a source's rows, drawn at random; `1.0` all of
    them, `2.0` all of them twice; `500` (without a point) the first 500, and more than there are if there are fewer.

    Raises:
        ValueError: lists all bad pairs, and says what to write instead.
    """
    if len(mixer_list) % 2:
        raise ValueError(
            f"{flag} must be name, amount, name, amount, …; got {len(mixer_list)} words: {' '.join(map(str, mixer_list))}"
        )
    mistakes = Mistakes()
    pairs: list[tuple[str, Amount]] = []
    for name, amount in zip(mixer_list[::2], mixer_list[1::2], strict=True):
        try:
            pairs.append((str(name), _parse_amount(str(amount))))
        except ValueError:
            mistakes.add(
                f"{flag} {name} {amount}: an amount is a share of the rows such as 1.0, or a count such as 500"
            )
    mistakes.raise_any()
    return pairs


def _parse_amount(text: str) -> Amount:
    amount = float(text) if "." in text else int(text)
    if not (0 < amount <= MOST_REPEATS if isinstance(amount, float) else 0 < amount <= MOST_ROWS):
        raise ValueError(text)
    return amount


def rows_of_amount(num_rows: int, num_wanted: int) -> tuple[int, np.ndarray]:
    """How often each of `num_rows` rows is used, and the rows (numbered from 0) that are used once more, drawn with a fixed seed.

    Example: 10 rows of 4 are 2 times all, and 2 more.
    """
    repeats, extra = divmod(num_wanted, num_rows)
    drawn = np.random.RandomState(SEED_OF_SUBSETS).choice(num_rows, size=extra, replace=False)
    return repeats, drawn


def splits_of_names(splits: Sequence[str], num_names: int, flag: str = "--dataset_mixer_list_splits") -> list[str]:
    """One split per name. A single split holds for all names.

    Raises:
        ValueError: the number of splits is neither 1 nor the number of names.
    """
    if len(splits) == 1:
        return list(splits) * num_names
    if len(splits) != num_names:
        raise ValueError(
            f"{flag} needs one split, or one for each of the {num_names} names; got {len(splits)}: {' '.join(splits)}"
        )
    return list(splits)
