"""Nothing tells that tokens were sampled on keys and values of older weights."""

from collections.abc import Callable

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.data_types import Completion
from open_instruct.engines.kv_ages import KvAges

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/prime-rl #1650",),
    subject="engines and weights",
    happened="A dependency stopped asking for the log-probs of prompts, which switched the engine's prefix cache on. It "
    "was not emptied with new weights, and the mismatch between engine and trainer rose without any number that "
    "named the cause.",
    here="Each response carries the age of the oldest keys and values that it attended to, and `kv_age/max` reports it"
    " (`engines/kv_ages.py`).",
)
PROMPT = np.arange(8, dtype=np.int32)
Age = Callable[[int, int], int | None]
"""Of a response of a version to a prompt whose beginning an older version has computed."""


def check(age: Age) -> None:
    assert age(3, 3) == 0
    assert age(3, 4) == 1
    assert age(3, 20) == 17


def theirs(computed_by: int, sampled_by: int) -> int:
    """The age of the tokens, which says nothing of the cache."""
    del computed_by
    return sampled_by - sampled_by


def ours(computed_by: int, sampled_by: int) -> int | None:
    ages = KvAges("kept", block_size=4, num_blocks=100)
    last = None
    for version, num_cached in ((computed_by, 0), (sampled_by, 8)):
        ages.note_admitted(PROMPT, version=version)
        response = Completion(np.array([9], np.int32), np.zeros(1, np.float32), "stop", [(version, 1)])
        [last] = ages.aged(PROMPT, num_cached, [response], version=version)
    assert last is not None
    return last.kv_age


def test_age_of_the_tokens_alone_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_age_of_keys_and_values_is_known_here() -> None:
    check(ours)
