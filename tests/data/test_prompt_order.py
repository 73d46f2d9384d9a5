"""The order of prompts depends on the seed and the number of rows alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.prompt_order import PromptOrder, prompt_index


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = PromptOrder(num_rows, seed)
    issued = [order[epoch * num_rows + position] for position in range(num_rows)]
    assert {issue_epoch for issue_epoch, _ in issued} == {epoch}
    assert sorted(row for _, row in issued) == list(range(num_rows))


@given(num_rows=st.integers(1, 20), seed=st.integers(0, 2**32), asked=st.lists(st.integers(0, 100), max_size=20))
def test_the_order_does_not_depend_on_what_was_asked_before(num_rows: int, seed: int, asked: list[int]) -> None:
    order = PromptOrder(num_rows, seed)
    for issue_number in asked:
        assert order[issue_number] == PromptOrder(num_rows, seed)[issue_number]
        assert order[issue_number][1] == prompt_index(issue_number, num_rows, seed)
        assert len(order._permutations) <= 2


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(PromptOrder(50, seed)[epoch * 50 + i][1] for i in range(50)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_written_down() -> None:
    """A checkpoint holds the number of prompts issued and no order: if this fails, old runs resume wrong."""
    assert [PromptOrder(10, 42)[i][1] for i in range(20)] == [
        5,
        6,
        0,
        7,
        3,
        2,
        4,
        9,
        1,
        8,
        0,
        8,
        7,
        4,
        3,
        1,
        2,
        9,
        6,
        5,
    ]


def test_turning_back_to_the_last_epoch_shuffles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order = PromptOrder(10, 1)
    before = [order[i] for i in range(25)]
    monkeypatch.setattr(np.random, "default_rng", None)
    assert [order[i] for i in range(10, 25)] == before[10:]


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="no order of 0 rows"):
        PromptOrder(0, 1)
    with pytest.raises(IndexError, match="numbered from 0"):
        PromptOrder(3, 1)[-1]
