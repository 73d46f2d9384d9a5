"""The trainer waits for samples after the last prompt was sampled."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.data.prompt_order import PromptOrder

EXHIBIT = Exhibit(
    reports=("thinking-machines-lab/tinker-cookbook #480", "thinking-machines-lab/tinker-cookbook #107"),
    subject="prompts and resuming",
    happened="The data loader came to its end while the training loop still waited for samples, on a queue into which "
    "nothing was put any more. The order to stop was given only after that loop, so the run hung.",
    here="The prompt order has no end: after each pass over the data a pass in another order begins, so a dropped "
    "prompt is always replaced, and the number of steps alone ends a run (`data/prompt_order.py`).",
)
Order = Callable[[int, int], list[int]]
"""Number of rows and of prompts that are needed -> rows."""


def check(rows: Order) -> None:
    """Ten rows, five steps of two prompts, and three prompts that were dropped."""
    issued = rows(10, 5 * 2 + 3)
    assert len(issued) == 13
    assert sorted(issued[:10]) == list(range(10))
    assert set(issued[10:]) <= set(range(10))


def theirs(num_rows: int, number: int) -> list[int]:
    loader = iter(range(num_rows))
    return [row for row, _ in zip(loader, range(number), strict=False)]


def ours(num_rows: int, number: int) -> list[int]:
    order = PromptOrder(num_rows, 1)
    return [order[issue_number][1] for issue_number in range(number)]


def test_loader_that_ends_early_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_prompts_do_not_end_before_the_steps_here() -> None:
    check(ours)
