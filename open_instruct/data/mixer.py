"""Reads a mixer list: `[name, amount, name, amount, …]`, and a split for each name."""

from collections.abc import Sequence

import numpy as np

from open_instruct.system.counted import counted

MOST_MISTAKES_SHOWN = 20
MOST_ROWS = 10**12
Amount = int | float
"""How many rows of a source are used: an int is their number, a float their share."""
MOST_REPEATS = 10_000
SEED_OF_SUBSETS = 42
"""The seed of open-instruct, so that the same share of a dataset gives the same rows."""


class DatasetError(ValueError):
    """All mistakes in the data, in one message."""


class Mistakes:
    """Collects mistakes, so that the user reads all of them at once."""

    def __init__(self) -> None:
        self.count = 0
        self._mistakes: list[str] = []
        self._alike: dict[tuple[str, str], tuple[int, int]] = {}
        """For each source and row problem: index in `_mistakes`, and number of further such rows of the source."""

    def add(self, mistake: str) -> None:
        self.count += 1
        if len(self._mistakes) < MOST_MISTAKES_SHOWN:
            self._mistakes.append(mistake)

    def add_row(self, source: str, place: object, problem: str) -> None:
        """Add a row's problem. Further rows of the source with the same problem are only counted, in the first row's message."""
        if (source, problem) in self._alike:
            number, count = self._alike[source, problem]
            self._alike[source, problem] = number, count + 1
            return
        if len(self._mistakes) < MOST_MISTAKES_SHOWN:
            self._alike[source, problem] = len(self._mistakes), 0
        self.add(f"{source} {place}: {problem}")

    def raise_any(self) -> None:
        """Raises `DatasetError` if there are any mistakes."""
        if not self.count:
            return
        messages = list(self._mistakes)
        for number, count in self._alike.values():
            messages[number] += f" The same holds for {count} more row{'s' * (count > 1)}." if count else ""
        more = [f"and {self.count - len(self._mistakes)} more"] if self.count > len(self._mistakes) else []
        raise DatasetError("\n".join(messages + more))


def parse_mixer_list(mixer_list: Sequence[str], flag: str = "--dataset_mixer_list") -> list[tuple[str, Amount]]:
    """`[name, amount, name, amount, …]` as pairs. The amount `0.5` means half of a source's rows, drawn at random; `1.0` all
    rows; `2.0` all rows twice; `500` (without a point) the first 500 rows, with repetitions if the source has fewer.

    Raises:
        ValueError: there are bad pairs. The message lists all of them, and says what to write instead.
    """
    if len(mixer_list) % 2:
        raise ValueError(
            f"{flag} must be name, amount, name, amount, …; got {counted(len(mixer_list), 'word')}: "
            f"{' '.join(map(str, mixer_list))}"
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
    """How often each of `num_rows` rows is used, and which rows (numbered from 0) are used once more, drawn with a fixed seed.

    Example: to get 10 rows from 4, all rows are used 2 times, and 2 rows once more.
    """
    repeats, extra = divmod(num_wanted, num_rows)
    drawn = np.random.RandomState(SEED_OF_SUBSETS).choice(num_rows, size=extra, replace=False)
    return repeats, drawn


def splits_of_names(splits: Sequence[str], num_names: int, flag: str = "--dataset_mixer_list_splits") -> list[str]:
    """One split per name. A single split is used for all names.

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
