"""A run that resumes at the end of an epoch, or in a later one, skips rows or takes them twice."""

from collections.abc import Callable

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.data.prompt_order import PromptOrder

EXHIBIT = Exhibit(
    reports=("verl-project/verl #7401", "verl-project/verl #5725", "huggingface/accelerate #2016"),
    subject="prompts and resuming",
    happened="The saved state of a data loader says how far the current epoch is. Saved at the end of an epoch, it emptied"
    " the next one, so runs ended at once with exit code 0; in later epochs the order of the first was taken up "
    "again.",
    here="The order of rows depends on the seed and the epoch alone, and a checkpoint has the number of prompts that "
    "were issued in all, so there is no loader whose state could be wrong (`data/prompt_order.py`).",
)
NUM_ROWS, NUM_EPOCHS, SEED = 6, 3, 4
NUM_PROMPTS = NUM_ROWS * NUM_EPOCHS


def check(rows_from: Callable[[int], list[int]]) -> None:
    """The rows of a run that was resumed after so many prompts, up to the end of the run."""
    whole = rows_from(0)
    epochs = [whole[start : start + NUM_ROWS] for start in range(0, NUM_PROMPTS, NUM_ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * NUM_EPOCHS
    assert epochs[0] != epochs[1]
    for num_issued in range(NUM_PROMPTS):
        assert rows_from(num_issued) == whole[num_issued:], num_issued


def order_of(epoch: int) -> list[int]:
    return np.random.default_rng([SEED, epoch]).permutation(NUM_ROWS).tolist()


def theirs_at_the_end(num_issued: int) -> list[int]:
    """A loader at the end of an epoch is at its last row, and that place is restored in the epoch that begins."""
    epoch, place = divmod(num_issued, NUM_ROWS)
    place = NUM_ROWS if num_issued and place == 0 else place
    return order_of(epoch)[place:] + [row for later in range(epoch + 1, NUM_EPOCHS) for row in order_of(later)]


def theirs_in_a_later_epoch(num_issued: int) -> list[int]:
    """A new loader counts its epochs from 0, wherever the run is."""
    epoch, place = divmod(num_issued, NUM_ROWS)
    return [row for later in range(NUM_EPOCHS - epoch) for row in order_of(later)][place:]


def ours(num_issued: int) -> list[int]:
    order = PromptOrder(NUM_ROWS, SEED)
    return [order[number][1] for number in range(num_issued, NUM_PROMPTS)]


@pytest.mark.parametrize("theirs", [theirs_at_the_end, theirs_in_a_later_epoch])
def test_restored_loader_is_caught(theirs: Callable[[int], list[int]]) -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_rows_go_on_where_they_were_here() -> None:
    check(ours)
