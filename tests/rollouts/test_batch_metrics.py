"""Metrics of a batch: exact numbers on small groups."""

import dataclasses

import numpy as np
import pytest
from group_fakes import make_group, make_spanned_group, samples_of, spans_of_a_group, token_versions
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from open_instruct.report.histogram import histogram, is_histogram
from open_instruct.rollouts.batch_metrics import (
    OverIssueBias,
    advantage_metrics,
    freshness_metrics,
    num_computed_tokens,
    response_metrics,
    scoring_metrics,
    standard_error,
    step_metrics,
    straggler_metrics,
)
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics
from open_instruct.rollouts.packing import Layout, prepare_collated_data_for_workers
from open_instruct.rollouts.training_samples import fresh_masks
from open_instruct.scored_groups import ScoredGroup, split


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
    [
        *[([0, 0, 0], True), ([1, 1], True), ([0.5, 0.5], True), ([0, 0, 1], False), ([0.5, 0.25], False), ([1], True)],
        *[([0.3, 0.30000001, 0.3], True), ([0.7, 0.69999996], True), ([0.3, 0.30001], False), ([0, 1e-5], False)],
    ],
)
def test_has_zero_std(scores: list[float], expected: bool) -> None:
    assert make_group(scores).has_zero_std is expected


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


def test_ages_are_those_of_the_tokens_that_the_policy_sampled() -> None:
    group = make_spanned_group([[(3, 10)]])
    (sample,) = group.samples
    inserted = np.arange(10) < 4  # the version of a tool's tokens is that of the policy's token before them
    told = dataclasses.replace(sample, version_spans=[(1, 4), (3, 6)], loss_mask=~inserted)
    group = dataclasses.replace(group, result=dataclasses.replace(group.result, samples=[told]))
    metrics = freshness_metrics(4, [group], [0], now=0.0)
    assert metrics["freshness/avg_token_age"] == 0.0
    assert metrics["version_diversity"] == 1


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


def test_standard_error_is_that_of_the_groups_means() -> None:
    groups = [make_group(scores) for scores in ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0])]
    # Mean rewards 10, 5, 0, 5: their variance with n - 1 is 50 / 3, divided by 4 groups.
    assert standard_error(groups, verification_reward=10.0) == {
        "all_groups/scores_standard_error": pytest.approx((50 / 3 / 4) ** 0.5)
    }
    assert standard_error(groups[:1], verification_reward=10.0) == {}
