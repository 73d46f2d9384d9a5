"""From scored groups to training samples: advantages and masks of small groups."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from group_fakes import make_group, make_spanned_group, samples_of, spans_of_a_group, token_versions
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.data_types import TrainingSample
from open_instruct.rollouts.batch_metrics import num_computed_tokens
from open_instruct.rollouts.packing import prepare_collated_data_for_workers
from open_instruct.rollouts.training_samples import fresh_masks, training_samples
from open_instruct.scored_groups import ScoredGroup


def test_centered_advantages() -> None:
    samples = samples_of(make_group([1, 0, 0, 0]), make_group([1, 1, 0, 0.5]))
    assert [sample.advantage for sample in samples] == [7.5, -2.5, -2.5, -2.5, 3.75, 3.75, -6.25, -1.25]


def test_standard_advantages() -> None:
    samples = samples_of(make_group([1, 0, 0, 0]), normalization="standard")
    # Mean 1/4, standard deviation sqrt(3)/4, whatever a right answer is worth.
    assert [sample.advantage for sample in samples] == pytest.approx([3**0.5] + [-(3**-0.5)] * 3)


def test_a_sample_is_what_the_engine_gave() -> None:
    first, second = samples_of(make_group([1, 0], lengths=[2, 3]))
    np.testing.assert_array_equal(first.query, [7, 8, 9])
    np.testing.assert_array_equal(second.response, [10, 11, 12])
    np.testing.assert_array_equal(second.logprobs, np.full(3, -1.5, dtype=np.float32))
    np.testing.assert_array_equal(second.mask, [True] * 3)
    assert (len(first), len(second)) == (5, 6)


def test_truncated_responses_are_trained_on_unless_masked() -> None:
    group = make_group([1, 0, 0, 0], reasons=["stop", "length", "stop", "abort"])
    assert len(samples_of(group)) == 4
    masked = samples_of(group, mask=True)
    assert [int(sample.response[0]) for sample in masked] == [0, 20]
    # The baseline is still that of all four.
    assert [sample.advantage for sample in masked] == [7.5, -2.5]


def test_when_all_are_truncated_nothing_is_trained_on() -> None:
    group = make_group([1, 0], reasons=["length", "length"])
    samples = samples_of(group, mask=True)
    assert samples == []
    ranks = prepare_collated_data_for_workers(
        samples, dp_world_size=2, pack_length=16, rows=1, layout="padded", pad_token_id=0
    )
    assert [[mini_batch.num_global_tokens for mini_batch in rank] for rank in ranks] == [[0], [0]]
    assert num_computed_tokens(ranks) == 4  # a row of two tokens for each rank


def test_an_empty_response_counts_in_the_baseline_and_is_left_out() -> None:
    samples = samples_of(make_group([1, 0], lengths=[2, 0]))
    assert [sample.advantage for sample in samples] == [5.0]


@settings(deadline=None)
@given(
    scores=st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=5),
    normalization=st.sampled_from(["centered", "standard"]),
)
def test_advantages_of_a_group_add_up_to_nothing(scores: list[list[float]], normalization: str) -> None:
    samples = samples_of(*(make_group(group) for group in scores), normalization=normalization)
    advantages_PG = np.array([sample.advantage for sample in samples]).reshape(-1, 4)
    np.testing.assert_allclose(advantages_PG.sum(axis=1), 0, atol=1e-5)
    for group, advantages in zip(scores, advantages_PG, strict=True):
        # A better answer never has the smaller advantage.
        assert np.all(np.diff(advantages[np.argsort(group)]) >= 0)


def truncated_samples(group: ScoredGroup, masks: Sequence[np.ndarray]) -> list[TrainingSample]:
    return training_samples(
        [group],
        verification_reward=1.0,
        advantages=partial(group_advantages, name="centered"),
        mask_truncated_completions=False,
        masks=[masks],
    )


def test_fresh_tokens_are_those_of_new_enough_weights() -> None:
    group = make_spanned_group([[(2, 2), (4, 3)], [(3, 4)], []])
    masks = fresh_masks(group.result, 4)
    assert [mask.tolist() for mask in masks] == [[False] * 2 + [True] * 3, [False] * 4, []]
    [sample] = truncated_samples(group, masks)  # the others have no fresh token, but counted in the baseline
    assert sample.advantage == pytest.approx(-1 / 3)
    assert sample.mask.tolist() == masks[0].tolist()
    assert len(sample.response) == len(sample.logprobs) == 5


@settings(deadline=None)
@given(spans_G=spans_of_a_group, oldest_allowed=st.integers(0, 7))
def test_a_token_is_trained_on_just_if_it_is_fresh(spans_G, oldest_allowed: int) -> None:
    group = make_spanned_group(spans_G)
    masks = fresh_masks(group.result, oldest_allowed)
    assert [mask.tolist() for mask in masks] == [
        [version >= oldest_allowed for version in token_versions(spans)] for spans in spans_G
    ]
    assert all(mask.dtype == bool for mask in masks)
    samples = truncated_samples(group, masks)
    assert [sample.mask.tolist() for sample in samples] == [mask.tolist() for mask in masks if mask.any()]
    whole = truncated_samples(group, [np.ones_like(mask) for mask in masks])
    advantages = {sample.response.tobytes(): sample.advantage for sample in whole}
    assert all(advantages[sample.response.tobytes()] == sample.advantage for sample in samples)
