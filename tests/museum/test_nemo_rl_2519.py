"""A run is resumed with other data, and skips as many rows of them as the old run had used."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import TINY_MODEL, make_args
from controller_stage import load_rows
from exhibit import Exhibit
from transformers import AutoTokenizer

from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.run_identity import differences, run_identity, tokenizer_identity

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/RL #2519",),
    subject="prompts and resuming",
    happened="The state of the data loader was restored although the run had been given another data set: as many of its "
    "rows as the first run had used were skipped without a word, and a data set with fewer rows than that crashed"
    " the run.",
    here="A checkpoint holds what its data were, row by row. A run with other data is refused before anything starts, "
    "with the difference named (`data/run_identity.py`).",
)
Resume = Callable[[PromptDataset, PromptDataset], str]
"""The data of the checkpoint and of the new run -> why the run does not go on; "" if it does."""


def rows(size: int, seed: int) -> PromptDataset:
    source = f"reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size={size}&seed={seed}"
    return load_rows(source, AutoTokenizer.from_pretrained(TINY_MODEL))


def check(resume: Resume) -> None:
    before = rows(10, seed=1)
    assert not resume(before, rows(10, seed=1))
    assert "train" in resume(before, rows(10, seed=2))
    assert "train" in resume(before, rows(12, seed=1))


def theirs(before: PromptDataset, now: PromptDataset) -> str:
    return "" if len(now) > 0 and len(before) > 0 else "no rows"


def ours(before: PromptDataset, now: PromptDataset) -> str:
    tokenizer = tokenizer_identity(AutoTokenizer.from_pretrained(TINY_MODEL), str(TINY_MODEL))
    args: Any = make_args()

    def identity(data: PromptDataset) -> dict[str, Any]:
        texts: dict[str, Any] = {}
        parts = {"texts": texts, "tokenizer": tokenizer, "train": data.fingerprint(), "eval": None}
        return run_identity(args) | parts

    return " ".join(differences(identity(before), identity(now)))


def test_place_in_other_data_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_other_data_are_refused_here() -> None:
    check(ours)
