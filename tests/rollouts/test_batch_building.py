"""From scored groups to samples and metrics: exact numbers on small groups."""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from group_fakes import make_result
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.data_types import TokenStatistics, TrainingSample
from open_instruct.report.histogram import histogram, is_histogram
from open_instruct.rollouts.batch_building import (
    OverIssueBias,
    advantage_metrics,
    evaluation_metrics,
    fresh_masks,
    freshness_metrics,
    num_computed_tokens,
    pass_at_k_metrics,
    response_metrics,
    scoring_metrics,
    step_metrics,
    straggler_metrics,
    training_samples,
)
from open_instruct.rollouts.packing import Layout, prepare_collated_data_for_workers
from open_instruct.scored_groups import ScoredGroup, last_samples, split


def make_group(
    scores: Sequence[float],
    *,
    prompt_id: str = "train-0",
    lengths: Sequence[int] | None = None,
    reasons: Sequence[str] | None = None,
    spans: Sequence[tuple[int, int]] = ((0, 1),),
    dataset: str = "reasoning_gym/chain_sum",
    num_failures: int = 0,
    seconds: float = 1.0,
    start_time: float = 100.0,
) -> ScoredGroup:
    """Response `i` has `lengths[i]` tokens `10 * i, 10 * i + 1, …`; the query is `[7, 8, 9]`."""
    lengths = lengths or [2] * len(scores)
    result = make_result(
        responses=[np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate(lengths)],
        logprobs=[np.full(n, -0.5 - i, dtype=np.float32) for i, n in enumerate(lengths)],
        finish_reasons=list(reasons or ["stop"] * len(scores)),
        version_spans=[list(spans) for _ in scores],
        index=0,
        prompt_id=prompt_id,
        issue_version=0,
        engine_id=0,
        token_statistics=TokenStatistics(3, sum(lengths), seconds, start_time),
    )
    return ScoredGroup(result, dataset, np.array(scores, dtype=np.float32), num_failures)


def samples_of(*groups: ScoredGroup, normalization: str = "centered", mask: bool = False) -> list[TrainingSample]:
    return training_samples(
        groups,
        verification_reward=10.0,
        advantages=partial(group_advantages, name=normalization),
        mask_truncated_completions=mask,
    )


# --- groups and samples -----------------------------------------------------------------------------------------------


def test_a_rollout_of_one_group_is_not_copied() -> None:
    whole = make_group([0, 1], lengths=[2, 3])
    assert split(whole)[0] is whole


def test_the_tokens_of_a_group_are_those_of_its_samples() -> None:
    whole = make_group([0, 1], lengths=[2, 3])
    # 45 of them are of turns that are no samples.
    with_turns = dataclasses.replace(whole.result.token_statistics, num_response_tokens=50)
    [one] = split(dataclasses.replace(whole, result=dataclasses.replace(whole.result, token_statistics=with_turns)))
    assert one.result.token_statistics.num_response_tokens == 5


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([0, 0, 0], True), ([1, 1], True), ([0.5, 0.5], True), ([0, 0, 1], False), ([0.5, 0.25], False), ([1], True)],
)
def test_has_zero_std(scores: list[float], expected: bool) -> None:
    assert make_group(scores).has_zero_std is expected


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


# --- metrics of responses ---------------------------------------------------------------------------------------------


def test_the_weight_of_a_verifier_scales_rewards_and_advantages_and_no_rate() -> None:
    light = dataclasses.replace(make_group([1.0, 0.0], dataset="light/x"), reward_weight=0.25, cost=0.5)
    plain = dataclasses.replace(make_group([1.0, 0.0], dataset="plain"), cost=0.25)
    assert [sample.advantage for sample in samples_of(light, plain)] == [1.25, -1.25, 5.0, -5.0]
    metrics = response_metrics([light, plain], verification_reward=8.0)
    assert (metrics["objective/light_reward"], metrics["objective/plain_reward"]) == (1.0, 4.0)
    assert metrics["scores"] == metrics["objective/verifiable_reward"] == 2.5
    assert metrics["objective/light_correct_rate"] == metrics["objective/verifiable_correct_rate"] == 0.5
    assert scoring_metrics([light, plain])["objective/verifier_cost"] == 0.75
    assert "objective/verifier_cost" not in scoring_metrics([make_group([1.0])])


def test_response_metrics() -> None:
    groups = [
        make_group([1, 0.5], lengths=[2, 4], reasons=["stop", "length"], num_failures=1),
        make_group([0, 0], lengths=[6, 8], dataset="gsm8k"),
    ]
    assert scoring_metrics(groups) == {"objective/verifier_failures": 1.0, "objective/not_scored": 0.0}
    assert response_metrics(groups, verification_reward=10.0) == {
        "scores": 3.75,
        "objective/verifiable_reward": 3.75,
        "objective/verifiable_correct_rate": 0.5,  # part of a score counts, as in open-instruct
        "objective/verifiable_solved_rate": 0.25,
        "val/stop_rate": 0.75,
        "val/sequence_lengths": 5.0,
        "val/sequence_lengths_min": 2.0,
        "val/sequence_lengths_max": 8.0,
        "val/sequence_lengths_solved": 2.0,
        "val/sequence_lengths_solved_hist": histogram([2]),
        "val/sequence_lengths_unsolved": 7.0,  # the response of 4 tokens has a part of the score
        "val/sequence_lengths_unsolved_hist": histogram([6, 8]),
        "objective/reasoning_gym_reward": 7.5,
        "objective/reasoning_gym_correct_rate": 1.0,
        "objective/reasoning_gym_solved_rate": 0.5,
        "objective/gsm8k_reward": 0.0,
        "objective/gsm8k_correct_rate": 0.0,
        "objective/gsm8k_solved_rate": 0.0,
    }


@pytest.mark.parametrize(("score", "rate"), [(0.0, 0), (0.5, 0), (0.99, 0), (1.0, 1), (np.nextafter(1, 0), 1)])
def test_partial_credit_is_not_solved(score: float, rate: float) -> None:
    group = make_group([score, score])
    assert response_metrics([group], verification_reward=1.0)["objective/verifiable_solved_rate"] == rate
    assert evaluation_metrics([group], verification_reward=1.0)["eval/pass_at_1"] == rate
    metrics = step_metrics([group], [group], num_prompts=1)
    assert metrics["all_groups/percent_solved_mean"] == rate
    assert metrics["batch/percent_solved_mean"] == pytest.approx(score)
    assert metrics["unsolved_batch_size_ratio"] == metrics["batch/unsolved_groups_ratio"] == 1 - rate


@pytest.mark.parametrize(("score", "there"), [(0.0, "unsolved"), (1.0, "solved")])
def test_a_mean_over_nothing_is_left_out(score: float, there: str) -> None:
    metrics = response_metrics([make_group([score])], verification_reward=1.0)
    name = f"val/sequence_lengths_{there}"
    assert [key for key in metrics if "lengths" in key and "solved" in key] == [name, f"{name}_hist"]


@pytest.mark.parametrize("dataset", ["gsm8k", "gsm8k?tolerance=1", "gsm8k/a/b", "gsm8k?path=a/b"])
def test_rates_are_by_verifier_whatever_its_parameters(dataset: str) -> None:
    metrics = response_metrics([make_group([1, 0], dataset=dataset)], verification_reward=2.0)
    assert metrics["objective/gsm8k_reward"] == 1.0
    assert metrics["objective/gsm8k_correct_rate"] == 0.5


# --- metrics of a step ------------------------------------------------------------------------------------------------


def test_step_metrics() -> None:
    kept = [
        make_group([1, 0], prompt_id="a", lengths=[2, 4], spans=[(3, 1), (4, 1)], seconds=2.0),
        make_group([0.5, 0], prompt_id="b", lengths=[1, 1], spans=[(4, 1)], seconds=4.0, start_time=103.0),
    ]
    dropped = [
        make_group([0, 0], prompt_id="c", spans=[(1, 1)], seconds=1.0),
        make_group([1, 1], prompt_id="d", spans=[(9, 1)], seconds=1.0),
        make_group([0.5, 0.5], prompt_id="e", spans=[(9, 1)], seconds=2.0),
    ]
    groups = [dropped[0], kept[0], dropped[1], kept[1], dropped[2]]
    metrics = step_metrics(groups, kept, num_prompts=4)
    histograms = {name: metrics.pop(name) for name in list(metrics) if is_histogram(metrics[name])}
    assert metrics == {
        "batch/total_prompts": 2,
        "batch/filtered_prompts": 3,
        "batch/filtered_prompts_zero": 1,
        "batch/filtered_prompts_solved": 1,
        "batch/filtered_prompts_nonzero": 1,
        "batch/filtered_prompts_pct": 0.6,
        "batch/percent_solved_mean": 0.375,
        "batch/prompt_lengths_mean": 3.0,
        "batch/response_lengths_mean": 2.0,
        "batch/unsolved_groups_ratio": 0.5,
        "all_groups/total_prompts": 5,
        "all_groups/percent_solved_mean": 0.3,
        "real_batch_size_ratio": 0.5,
        "unsolved_batch_size_ratio": 0.75,
        "val/total_reward_groups": 2,
        "val/num_step_tokens": 14,  # two prompts of 3, each once
        "val/num_step_response_tokens": 8,
        "val/actor_tokens_per_second": 14 / 4.0,
        "time/generation": 7.0,  # from second 100 to second 107
        "time/group_generation_mean": 3.0,
        "time/group_generation_min": 2.0,
        "time/group_generation_max": 4.0,
    }
    assert histograms == {
        "batch/percent_solved_hist": histogram([0.5, 0.25]),
        "val/solve_rate_hist": histogram([0.5, 0.25]),
        "batch/prompt_lengths": histogram([3, 3]),
        "batch/response_lengths": histogram([2, 4, 1, 1]),
        "batch/per_group_generation_times": histogram([2.0, 4.0]),
    }


def test_filtered_prompts_are_sorted_by_the_scores_of_all_their_responses() -> None:
    """All rewards are 0 because no response has the form, whatever the first response scored."""
    kept = make_group([1, 0])
    dropped = [
        dataclasses.replace(make_group(scores), shaped_rewards=np.zeros(2))
        for scores in ([1, 0], [0, 1], [0, 0], [1, 1], [0.5, 0.5])
    ]
    metrics = step_metrics([kept, *dropped], [kept], num_prompts=1)
    assert [metrics[f"batch/filtered_prompts_{name}"] for name in ("zero", "solved", "nonzero")] == [1, 1, 3]


def test_histograms_count_every_number_once() -> None:
    one = histogram([1.0, 1.0, 3.0])
    assert (sum(one["counts"]), one["edges"][0], one["edges"][-1]) == (3, 1.0, 3.0)
    assert (one["counts"][0], one["counts"][-1]) == (2, 1)
    assert sum(histogram([5])["counts"]) == 1
    assert len(one["edges"]) == len(one["counts"]) + 1


def test_advantage_metrics_count_each_sample_once() -> None:
    samples = samples_of(make_group([1, 0, 0, 0], lengths=[9, 1, 1, 1]))
    assert advantage_metrics(samples) == {
        "val/advantages_mean": 0.0,
        "val/advantages_min": -2.5,
        "val/advantages_max": 7.5,
        "val/advantages_hist": histogram([7.5, -2.5, -2.5, -2.5]),
    }


def test_computed_tokens_count_padding_and_filling_rows() -> None:
    # Rows of 3 + 2 and 3 + 5 tokens: padded to 8 they are 16 positions, of which 13 are real.
    samples = samples_of(make_group([1, 0], lengths=[2, 5]))

    def ratio(*, ranks: int, pack_length: int, layout: Layout) -> float:
        batches = prepare_collated_data_for_workers(
            samples,
            dp_world_size=ranks,
            pack_length=pack_length,
            rows=1,
            layout=layout,
            pad_token_id=0,
        )
        return 13 / num_computed_tokens(batches)

    assert ratio(ranks=1, pack_length=16, layout="padded") == 13 / 16
    assert ratio(ranks=1, pack_length=16, layout="packed") == 1.0
    assert ratio(ranks=2, pack_length=16, layout="padded") == 1.0
    # A third rank has nothing to do but a row of two tokens.
    assert ratio(ranks=3, pack_length=16, layout="packed") == 13 / 15


# --- metrics of an evaluation -----------------------------------------------------------------------------------------


def test_evaluation_metrics() -> None:
    groups = [
        make_group([1], lengths=[4], seconds=2.0, start_time=100.0),
        make_group([0.5], lengths=[8], reasons=["length"], seconds=1.0, start_time=103.0),
    ]
    metrics = evaluation_metrics(groups, verification_reward=10.0)
    assert all(key.startswith("eval/") for key in metrics)
    chosen = {
        "eval/scores": 7.5,
        "eval/pass_at_1": 0.5,
        "eval/objective/verifiable_correct_rate": 1.0,
        "eval/objective/verifiable_solved_rate": 0.5,
        "eval/stop_rate": 0.5,
        "eval/sequence_lengths": 6.0,
        # 12 tokens of responses from second 100 to second 104; with two prompts of 3, in the 2 seconds of the slowest.
        "eval/response_tokens_per_second": 3.0,
        "eval/actor_tokens_per_second": 9.0,
    }
    assert {key: metrics[key] for key in chosen} == chosen


def test_evaluation_counts_what_an_environment_has_seen_solved() -> None:
    group = make_group([0.0, 0.0, 1.0, 0.0])
    given = zip(group.samples, [1.0, 0.9, None, 2.1], strict=True)
    samples = [dataclasses.replace(sample, environment_reward=reward) for sample, reward in given]
    played = dataclasses.replace(group, result=dataclasses.replace(group.result, samples=samples))
    metrics = evaluation_metrics([played], verification_reward=1.0)
    assert metrics["eval/pass_at_1"] == 0.75
    assert metrics["eval/scores"] == pytest.approx((1.0 + 0.9 + 1.0 + 2.1) / 4)


def test_ages_are_those_of_the_tokens_that_the_policy_sampled() -> None:
    group = make_spanned_group([[(3, 10)]])
    (sample,) = group.samples
    inserted = np.arange(10) < 4  # the version of a tool's tokens is that of the policy's token before them
    told = dataclasses.replace(sample, version_spans=[(1, 4), (3, 6)], loss_mask=~inserted)
    group = dataclasses.replace(group, result=dataclasses.replace(group.result, samples=[told]))
    metrics = freshness_metrics(4, [group], [0], now=0.0)
    assert metrics["freshness/avg_token_age"] == 0.0
    assert metrics["version_diversity"] == 1


def test_evaluation_of_conversations_counts_a_prompt_that_was_given_up() -> None:
    group = make_group([1.0, 1.0])
    goes_on = [dataclasses.replace(group.samples[0], goes_on=True), group.samples[1]]
    branched = dataclasses.replace(group, result=dataclasses.replace(group.result, samples=goes_on))
    lost = given_up(make_group([0.0]))
    answers = last_samples([branched, lost])
    assert [len(one.scores) for one in answers] == [1, 1]
    assert evaluation_metrics(answers, verification_reward=1.0)["eval/pass_at_1"] == 0.5


def given_up(group: ScoredGroup) -> ScoredGroup:
    nothing = dataclasses.replace(group.result, samples=[], error="generation_timeout: over 1 s")
    return dataclasses.replace(group, result=nothing, scores=np.zeros_like(group.scores))


def test_evaluation_counts_prompts_that_were_given_up_as_wrong_and_not_as_short() -> None:
    answered = [make_group([1], lengths=[4], seconds=2.0, start_time=100.0), make_group([0], lengths=[8])]
    late = given_up(make_group([1], lengths=[0], seconds=500.0, start_time=0.0))
    alone = evaluation_metrics(answered, verification_reward=10.0)
    metrics = evaluation_metrics([*answered, late, late], verification_reward=10.0)
    assert (alone["eval/num_given_up"], metrics["eval/num_given_up"]) == (0, 2)
    assert (alone["eval/pass_at_1"], metrics["eval/pass_at_1"]) == (0.5, 0.25)
    assert metrics["eval/scores"] == 2.5
    unknown = (
        "sequence_lengths",
        "sequence_lengths_min",
        "sequence_lengths_solved",
        "stop_rate",
        "actor_tokens_per_second",
    )
    assert [metrics[f"eval/{name}"] for name in unknown] == [alone[f"eval/{name}"] for name in unknown]


def test_the_speed_of_an_evaluation_is_that_of_all_turns() -> None:
    whole = make_group([1], lengths=[30], seconds=2.0, start_time=100.0)
    last_turn = make_group([1], lengths=[10], seconds=2.0, start_time=100.0)
    metrics = evaluation_metrics([last_turn], verification_reward=1.0, rollouts=[whole])
    assert metrics["eval/sequence_lengths"] == 10
    assert metrics["eval/response_tokens_per_second"] == 15


def test_evaluation_of_which_nothing_came_back_knows_no_lengths() -> None:
    metrics = evaluation_metrics([given_up(make_group([1]))], verification_reward=10.0)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_given_up"]) == (0.0, 1)
    assert not [name for name in metrics if "length" in name or "stop_rate" in name or "per_second" in name]


# --- who is fresh and who is slow -------------------------------------------------------------------------------------


def make_spanned_group(spans_G: Sequence[Sequence[tuple[int, int]]], **options: Any) -> ScoredGroup:
    """A group whose responses were sampled across updates of the weights, each with spans of its own."""
    lengths = [sum(num for _, num in spans) for spans in spans_G]
    group = make_group([i % 2 for i in range(len(spans_G))], lengths=lengths, **options)
    samples = [
        dataclasses.replace(sample, version_spans=list(spans))
        for sample, spans in zip(group.samples, spans_G, strict=True)
    ]
    return dataclasses.replace(group, result=dataclasses.replace(group.result, samples=samples))


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


spans_of_a_response = st.lists(st.integers(1, 4), max_size=4).flatmap(
    lambda lengths: st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths), unique=True).map(
        lambda versions: list(zip(sorted(versions), lengths, strict=True))
    )
)
spans_of_a_group = st.lists(spans_of_a_response, min_size=2, max_size=5)


def token_versions(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [version for version, num in spans for _ in range(num)]


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


@settings(deadline=None)
@given(
    groups_of_spans=st.lists(spans_of_a_group, min_size=1, max_size=4),
    oldest_allowed=st.integers(0, 6),
    cut_off=st.sets(st.integers(0, 4)),
    mask_truncated=st.booleans(),
)
def test_freshness_is_that_of_the_tokens_trained_on(groups_of_spans, oldest_allowed, cut_off, mask_truncated) -> None:
    """Against all tokens written out one by one, whatever the samples that training gets."""
    groups = [
        make_spanned_group(spans_G, reasons=["length" if i in cut_off else "stop" for i in range(len(spans_G))])
        for spans_G in groups_of_spans
    ]
    trained = [
        np.array(token_versions(spans))[sample_mask]
        for group in groups
        for spans, sample_mask, reason in zip(
            group.result.version_spans,
            fresh_masks(group.result, oldest_allowed),
            group.result.finish_reasons,
            strict=True,
        )
        if sample_mask.any() and (reason == "stop" or not mask_truncated)
    ]
    assume(trained)
    metrics = freshness_metrics(
        8, groups, [oldest_allowed] * len(groups), now=0.0, mask_truncated_completions=mask_truncated
    )
    ages = [7 - versions.min() for versions in trained]
    tokens = np.concatenate(trained)
    expected = {
        "avg_sample_age": np.mean(ages),
        "max_sample_age": max(ages),
        "min_sample_age": min(ages),
        "stale_samples_ratio": sum(age > 1 for age in ages) / len(ages),
    }
    for name, value in expected.items():
        assert metrics[name] == metrics[f"freshness/{name}"] == pytest.approx(value)
    assert metrics["freshness/avg_token_age"] == pytest.approx((7 - tokens).mean())
    assert metrics["version_diversity"] == len(set(tokens.tolist()))
    assert metrics["max_sample_age"] <= 7 - oldest_allowed
    assert metrics["num_steps_off_policy_max"] == metrics["max_sample_age"]
    assert (metrics["model_step_min"], metrics["model_step_max"]) == (tokens.min(), tokens.max())


def test_freshness_counts_each_response_by_itself() -> None:
    """An update came while the first response of one group was under way."""
    groups = [
        make_spanned_group([[(2, 1), (4, 3)], [(4, 2)]], seconds=2.0, start_time=100.0),
        make_spanned_group([[(1, 1)], [(3, 1)], [(4, 2)], [(4, 6)]], seconds=1.0, start_time=104.0),
    ]
    assert freshness_metrics(5, groups, [2, 1], now=108.0) == {
        "avg_sample_age": 1.0,  # 2, 0 and 3, 1, 0, 0
        "max_sample_age": 3,
        "min_sample_age": 0,
        "stale_samples_ratio": 2 / 6,
        "freshness/avg_sample_age": 1.0,
        "freshness/max_sample_age": 3,
        "freshness/min_sample_age": 0,
        "freshness/stale_samples_ratio": 2 / 6,
        "freshness/avg_token_age": pytest.approx((2 + 3 + 1) / 16),
        "freshness/avg_sample_latency": pytest.approx((2 * 6.0 + 4 * 3.0) / 6),
        "freshness/max_sample_latency": 6.0,
        "version_diversity": 4,
        "num_steps_off_policy": 2.5,
        "num_steps_off_policy_max": 3,
        "model_step_min": 1,
        "model_step_mean": 1.5,
        "model_step_max": 4,
    }
    # Only the tokens of version 4 are trained on: the responses without one are left out.
    truncated = freshness_metrics(5, groups, [4, 4], now=108.0)
    assert (truncated["max_sample_age"], truncated["version_diversity"]) == (0, 1)
    assert truncated["freshness/avg_sample_latency"] == pytest.approx((2 * 6.0 + 2 * 3.0) / 4)


def test_freshness_of_a_step_that_trains_on_nothing_is_that_of_its_groups() -> None:
    groups = [make_group([1, 0], reasons=["length"] * 2, spans=[(version, 2)]) for version in (1, 3)]
    metrics = freshness_metrics(5, groups, [1, 3], now=101.0, mask_truncated_completions=True)
    assert (metrics["min_sample_age"], metrics["max_sample_age"]) == (1, 3)
    assert metrics["freshness/avg_sample_latency"] == 0.0


def with_costs(
    group: ScoredGroup, *, score_s: float, num_preempted: int | None = None, engine_id: int = 0
) -> ScoredGroup:
    statistics = dataclasses.replace(group.result.token_statistics, num_preempted=num_preempted)
    result = dataclasses.replace(group.result, token_statistics=statistics, engine_id=engine_id)
    return dataclasses.replace(group, result=result, score_s=score_s)


def test_the_slowest_group_is_named() -> None:
    """The one whose generation and verification together took longest, though neither did."""
    long_generation = with_costs(make_group([1, 0], prompt_id="train-3", seconds=5.0), score_s=0.0, num_preempted=7)
    slowest = make_group([1, 0], prompt_id="train-4", lengths=[9, 7], seconds=4.0)
    slowest = with_costs(slowest, score_s=2.0, num_preempted=1, engine_id=6)
    long_verification = with_costs(make_group([1, 0], prompt_id="train-5", seconds=0.0), score_s=4.0, num_preempted=1)
    metrics = straggler_metrics([long_generation, slowest, long_verification])
    assert {name.removeprefix("agent_loop/slowest/"): v for name, v in metrics.items() if "/slowest/" in name} == {
        "prompt_id": "train-4",
        "engine_id": 6,
        "generate_sequences": 4.0,
        "tool_calls": 0.0,
        "compute_score": 2.0,
        "num_preempted": 1,
        "prompt_length": 3,
        "response_length": 9,
    }
    expected = {  # min, median, mean, max
        "generate_sequences": (0.0, 4.0, 3.0, 5.0),
        "tool_calls": (0.0, 0.0, 0.0, 0.0),
        "compute_score": (0.0, 2.0, 2.0, 4.0),
        "num_preempted": (1.0, 1.0, 3.0, 7.0),
    }
    for phase, numbers in expected.items():
        assert tuple(metrics[f"agent_loop/{phase}/{kind}"] for kind in ("min", "p50", "mean", "max")) == numbers
        assert numbers[1] <= metrics[f"agent_loop/{phase}/p95"] <= numbers[3]
    assert metrics["agent_loop/generate_sequences/p95"] == pytest.approx(4.9)


def test_preemptions_that_no_engine_told_are_absent_and_not_zero() -> None:
    silent, telling = make_group([1, 0], seconds=9.0), with_costs(make_group([1, 0]), score_s=0.0, num_preempted=4)
    assert not [name for name in straggler_metrics([silent]) if "num_preempted" in name]
    metrics = straggler_metrics([silent, telling])
    assert metrics["agent_loop/num_preempted/mean"] == 4.0
    assert "agent_loop/slowest/num_preempted" not in metrics


def test_what_over_issuing_prefers_is_told() -> None:
    """Means are over responses, not over groups."""
    bias = OverIssueBias()
    bias.record(make_group([1, 0], lengths=[2, 4]), is_straggler=False)
    assert bias.metrics() == {}
    bias.record(make_group([1, 0], lengths=[20, 40]), is_straggler=True)
    bias.record(make_group([1, 0, 0, 0], lengths=[9, 9, 9, 9]), is_straggler=False)
    assert bias.metrics() == {
        "over_issue/num_stragglers": 1,
        "over_issue/response_length_taken": 7.0,
        "over_issue/response_length_left": 30.0,
    }


def test_pass_at_k_is_unbiased() -> None:
    """Against all ways of choosing k of n responses."""
    correct = [np.array(row, dtype=bool) for row in ([1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0])]
    metrics = pass_at_k_metrics(correct)
    for k in (1, 2, 4):
        chosen = [np.mean([row[list(which)].any() for which in itertools.combinations(range(5), k)]) for row in correct]
        assert metrics[f"eval/pass_at_{k}_unbiased"] == pytest.approx(np.mean(chosen))
    assert metrics["eval/pass_at_1"] == pytest.approx((1 + 0 + 3) / 15)
    assert metrics["eval/pass_at_5"] == pytest.approx(2 / 3)
    assert set(metrics) == {"eval/pass_at_1", "eval/pass_at_5", *(f"eval/pass_at_{k}_unbiased" for k in (1, 2, 4))}


def test_with_one_response_pass_at_one_is_all() -> None:
    assert pass_at_k_metrics([np.array([True]), np.array([False])]) == {"eval/pass_at_1": 0.5}
