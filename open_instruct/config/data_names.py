"""The data of a run as options name them: the entries of a mixer list, and a short name for each."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Mixer:
    """The entries of one option that names data."""

    flag: str
    """The option, without dashes."""
    words: list[str]
    """`[name, amount, name, amount, …]`"""
    splits: list[str]
    """One for each name, or one for all."""


def short_names(entries: Sequence[str], *, reserved: Collection[str] = ()) -> list[str]:
    """A short name for each entry of a mixer list, for the names of metrics. All are different, and none is in `reserved`.

    `data/train.jsonl` is `train`, `openai/gsm8k?config=main` is `gsm8k`, `reasoning_gym/chain_sum?size=5` is `chain_sum`. Where
    two would have the same name, the folder comes before it: `gsm8k/test.parquet` and `math/test.parquet` are `gsm8k_test` and
    `math_test`. If that does not tell them apart, the second and later ones get a number: `chain_sum`, `chain_sum_2`.
    """
    counts = Counter(map(_short, entries))
    with_folders = Counter(map(_with_folder, entries))
    names: list[str] = []
    for entry in entries:
        short, longer = _short(entry), _with_folder(entry)
        name = longer if counts[short] > 1 and with_folders[longer] < counts[short] else short
        names.append(next(free for free in _numbered(name) if free not in names and free not in reserved))
    return names


def _short(entry: str) -> str:
    path = PurePath(entry.partition("?")[0])
    return _clean(path.stem if path.suffix in _FILE_SUFFIXES else path.name)


def _with_folder(entry: str) -> str:
    folder = PurePath(entry.partition("?")[0]).parent.name
    return _clean(f"{folder}_{_short(entry)}") if folder.strip(".") else _short(entry)


def _clean(name: str) -> str:
    """The name with `_` in place of every character that may not stand in the name of a metric."""
    return re.sub(r"[^\w.-]", "_", name) or "data"


def _numbered(name: str) -> Iterator[str]:
    """`name`, `name_2`, `name_3`, …"""
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1
