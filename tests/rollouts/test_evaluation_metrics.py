"""Exact metrics of small evaluations."""

import dataclasses
import itertools

import numpy as np
import pytest
from group_fakes import make_group

from open_instruct.report.accuracies import Accuracies
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics, pass_at_k_metrics, speed_metrics
from open_instruct.scored_groups import ScoredGroup, last_samples


def test_evaluation_metrics() -> None:
    groups = [
        make_group([1], lengths=[4], seconds=2.0, start_time=100.0),
        make_group([0.5], lengths=[8], reasons=["length"], seconds=1.0, start_time=103.0),
    ]
    metrics = evaluation_metrics(groups, verification_reward=10.0) | speed_metrics(groups)
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


def test_the_error_of_an_evaluation_is_that_of_the_mean_over_prompts() -> None:
    """Three prompts with shares 1, 0.5 and 0: their deviation is 0.5."""
    groups = [make_group([1, 1]), make_group([1, 0]), make_group([0, 0])]
    metrics = evaluation_metrics(groups, verification_reward=1.0)
    assert metrics["eval/pass_at_1_standard_error"] == pytest.approx(0.5 / 3**0.5)
    assert str(Accuracies.of(metrics)) == "50.0 ± 28.9% right"
    assert "eval/pass_at_1_standard_error" not in evaluation_metrics(groups[:1], verification_reward=1.0)


def test_evaluation_counts_what_an_environment_has_seen_solved() -> None:
    group = make_group([0.0, 0.0, 1.0, 0.0])
    given = zip(group.samples, [1.0, 0.9, None, 2.1], strict=True)
    samples = [dataclasses.replace(sample, environment_reward=reward) for sample, reward in given]
    played = dataclasses.replace(group, result=dataclasses.replace(group.result, samples=samples))
    metrics = evaluation_metrics([played], verification_reward=1.0)
    assert metrics["eval/pass_at_1"] == 0.75
    assert metrics["eval/scores"] == pytest.approx((1.0 + 0.9 + 1.0 + 2.1) / 4)


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
    alone = evaluation_metrics(answered, verification_reward=10.0) | speed_metrics(answered)
    metrics = evaluation_metrics([*answered, late, late], verification_reward=10.0)
    metrics |= speed_metrics([*answered, late, late])
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
    metrics = evaluation_metrics([last_turn], verification_reward=1.0, rollouts=[whole]) | speed_metrics([whole])
    assert metrics["eval/sequence_lengths"] == 10
    assert metrics["eval/response_tokens_per_second"] == 15


def test_evaluation_of_which_nothing_came_back_knows_no_lengths() -> None:
    nothing = [given_up(make_group([1]))]
    metrics = evaluation_metrics(nothing, verification_reward=10.0) | speed_metrics(nothing)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_given_up"]) == (0.0, 1)
    assert not [name for name in metrics if "length" in name or "stop_rate" in name or "per_second" in name]


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
