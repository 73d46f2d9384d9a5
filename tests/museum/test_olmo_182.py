"""A run that resumes with another batch size takes up the data at another place."""

from collections.abc import Callable

import pytest
from conftest import make_args
from exhibit import Exhibit

from open_instruct.data.prompt_order import PromptOrder
from open_instruct.data.run_identity import differences, run_identity

EXHIBIT = Exhibit(
    reports=("allenai/OLMo #182",),
    subject="prompts and resuming",
    happened="The place in the data was worked out from the number of steps and the batch size of now. With another batch "
    "size rows were left out or trained on again.",
    here="A checkpoint has the number of prompts that were issued, and a run with another number of prompts per step "
    "is refused before it starts, with the option and both values (`data/run_identity.py`).",
)
NUM_STEPS, NUM_ROWS = 3, 40
Rows = list[int] | str
"""The rows of the next step, or why the run is refused."""


def rows_from(issue_number: int, batch_size: int) -> list[int]:
    order = PromptOrder(NUM_ROWS, seed=1)
    return [order[number][1] for number in range(issue_number, issue_number + batch_size)]


def check(next_rows: Callable[[int, int], Rows]) -> None:
    """After three steps of a run, with its batch size then and now."""
    assert next_rows(4, 4) == rows_from(12, 4)
    for now in (2, 8):
        rows = next_rows(4, now)
        is_refused = isinstance(rows, str) and "was 4" in rows and f"now {now}" in rows
        assert is_refused or rows == rows_from(12, now)


def theirs(then: int, now: int) -> Rows:
    return rows_from(NUM_STEPS * now, now)


def ours(then: int, now: int) -> Rows:
    identities = [run_identity(make_args(num_unique_prompts_rollout=number)) for number in (then, now)]
    return "\n".join(differences(*identities)) or rows_from(NUM_STEPS * then, now)


def test_place_by_steps_and_batch_size_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_another_batch_size_is_refused_here() -> None:
    check(ours)
    assert isinstance(ours(4, 8), str)
