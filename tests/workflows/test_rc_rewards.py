"""Rewards, baselines and weights of reasoning-cache samples."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics, TrainingSample
from open_instruct.rollouts.collation import collate_packed, collate_padded
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics
from open_instruct.rollouts.prompt_ledger import IssuedPrompt
from open_instruct.rollouts.staleness import Assignment
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly
from open_instruct.scored_groups import ScoredGroup, split
from open_instruct.workflows.rc import rewards as rc_rewards
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION
from open_instruct.workflows.rc.weights import TurnWeights, parse_turn_weights, turn_weight

Entry = tuple[str, int, int, int]
"""Turn type, turn number, group, position of the summary that it follows."""
STATES: Sequence[Entry] = [(REASONING, 1, 0, -1)] * 2 + [(REASONING, 3, 1, -1)] * 2
WITH_SUMMARIES: Sequence[Entry] = [(SUMMARIZATION, 1, 0, -1)] * 2 + [
    (REASONING, 2, 1, 0),
    (REASONING, 2, 1, 0),
    (REASONING, 2, 2, 1),
    (REASONING, 2, 2, 1),
]


def samples(entries: Sequence[Entry], weights: TurnWeights = MappingProxyType({})) -> list[Sample]:
    """Response i is of length i + 2."""
    return [
        Sample(
            prompt_ids=np.array([5, 6, group], np.int32),
            response_ids=np.full(i + 2, i, np.int32),
            logprobs=np.full(i + 2, -0.5, np.float32),
            finish_reason="stop",
            version_spans=[(0, i + 2)],
            group=group,
            kind=kind,
            number=number,
            weight=turn_weight(weights, kind, number),
            is_judged=kind == REASONING,
            parent=parent,
        )
        for i, (kind, number, group, parent) in enumerate(entries)
    ]


def scored(
    entries: Sequence[Entry], scores: Sequence[float], num_failures: int = 0, weights: Sequence[str] = ()
) -> ScoredGroup:
    result = GenerationResult(
        samples=samples(entries, parse_turn_weights(weights)),
        index=0,
        prompt_id="train-0",
        issue_version=0,
        engine_id=0,
        token_statistics=TokenStatistics(3, 100, 0.5, 0.0),
        notes=[{}, {}],
    )
    return ScoredGroup(result, "sums", np.array(scores, np.float32), num_failures)


def assembled(
    group: ScoredGroup, **options: Any
) -> tuple[StepAssembly, list[tuple[ScoredGroup, list[TrainingSample]]]]:
    from conftest import make_args

    args = make_args(rollout_workflow="rc", verification_reward=1.0, **options)
    assembly = StepAssembly(1, args, CollationOptions(1, "packed", 0))
    assembly.add(group, Assignment(IssuedPrompt("train-0", 0, 0), 0, is_straggler=False))
    return assembly, list(assembly.trained)


def advantages(group: ScoredGroup, **options: Any) -> dict[int, list[float]]:
    """By baseline."""
    _, trained = assembled(group, filter_zero_std_samples=False, **options)
    return {part.first.group: [sample.advantage for sample in samples] for part, samples in trained}


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"), [("zero", [0, 0]), ("downstream_mean", [0.5, 1.0])], ids=["zero", "downstream_mean"]
)
def test_reward_of_a_summary(kind: Any, expected: list[float]) -> None:
    rewards = rc_rewards.rewards_of_turns(samples(WITH_SUMMARIES), [None, None, 0, 1, 1, 1], kind)
    assert rewards == [*expected, 0, 1, 1, 1]


def test_reward_of_a_summary_leaves_out_turns_that_were_not_scored() -> None:
    scores = [None, None, None, 1, None, None]
    rewards = rc_rewards.rewards_of_turns(samples(WITH_SUMMARIES), scores, "downstream_mean")
    assert rewards == [1, None, None, 1, None, None]


@pytest.mark.parametrize(
    ("text", "opens_think", "answer"),
    [("12", False, "12"), ("so</think>12", True, "12"), ("so 12", True, ""), ("<think>so</think>12", False, "12")],
)
def test_what_is_judged(text: str, opens_think: bool, answer: str) -> None:
    assert rc_rewards.answer_to_judge(text, opens_think=opens_think) == answer


# --- baselines --------------------------------------------------------------------------------------------------------


def test_each_state_has_a_baseline_of_its_own() -> None:
    """An easy state and a hard one: within each the advantages add up to 0."""
    found = advantages(scored(STATES, [1, 0.5, 0.25, 0]))
    assert found == {0: [0.25, -0.25], 1: [0.125, -0.125]}


def test_rewards_of_summaries_never_touch_reasoning() -> None:
    rng = np.random.default_rng(0)
    answers = [0, 1, 1, 0.5]
    seen = []
    for _ in range(20):
        found = advantages(scored(WITH_SUMMARIES, [*rng.random(2), *answers]), rc_summary_reward="downstream_mean")
        seen.append((found[1], found[2]))
    assert all(one == seen[0] == ([-0.5, 0.5], [0.25, -0.25]) for one in seen)


def test_parts_keep_what_belongs_to_them() -> None:
    group = scored(WITH_SUMMARIES, [0, 0, 0, 1, 1, 1], num_failures=2)
    parts = split(group)
    assert [(part.first.kind, part.first.number, len(part.scores)) for part in parts] == [
        (SUMMARIZATION, 1, 2),
        (REASONING, 2, 2),
        (REASONING, 2, 2),
    ]
    assert [len(response) for part in parts for response in part.result.responses] == [2, 3, 4, 5, 6, 7]
    assert [part.first.prompt_ids.tolist() for part in parts] == [[5, 6, 0], [5, 6, 1], [5, 6, 2]]
    assert sum(part.num_failures for part in parts) == 2
    assert [part.result.token_statistics.num_response_tokens for part in parts] == [5, 9, 13]


def test_a_group_of_one_or_of_equals_teaches_nothing() -> None:
    entries = [(REASONING, 1, 0, -1), (REASONING, 2, 1, -1), (REASONING, 2, 1, -1)]
    group = scored(entries, [1, 1, 1])
    assembly, trained = assembled(group)
    assert (assembly.has_gradient, trained) == (False, [])
    for kind in ("centered", "standard"):
        found = advantages(group, advantage_normalization_type=kind)
        assert found == {0: [0.0], 1: [0.0, 0.0]}


def test_one_baseline_of_a_prompt_can_teach_where_another_does_not() -> None:
    assembly, trained = assembled(scored(STATES, [1, 1, 1, 0]))
    assert [part.first.number for part, _ in trained] == [3]
    assembly.next_partial_batch(last=True)
    metrics = assembly.metrics(now=1.0) | rc_rewards.rollout_metrics(assembly.rollouts, assembly.groups)
    assert metrics["batch/filtered_prompts"] == 1
    assert metrics["rc/score_reasoning_1"] == 1.0
    assert metrics["rc/score_reasoning_3"] == 0.5
    assert metrics["rc/tokens_on_the_way"] == 100 - (2 + 3 + 4 + 5)
    assert metrics["rc/states_reached"] == 2


def test_summaries_count_in_no_accuracy() -> None:
    assembly, _ = assembled(
        scored(WITH_SUMMARIES, [1, 0, 0, 1, 0, 0]), rc_summary_reward="downstream_mean", filter_zero_std_samples=False
    )
    assembly.next_partial_batch(last=True)
    metrics = assembly.metrics(now=1.0) | rc_rewards.rollout_metrics(assembly.rollouts, assembly.groups)
    assert metrics["objective/verifiable_correct_rate"] == 0.25
    assert metrics["rc/score_summarization_1"] == 0.5


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_by_type_and_number() -> None:
    weights = parse_turn_weights(["reasoning=0.5", "reasoning:3=2"])
    assert [turn_weight(weights, REASONING, number) for number in (1, 2, 3)] == [0.5, 0.5, 2.0]
    assert turn_weight(weights, SUMMARIZATION, 3) == 1.0


@pytest.mark.parametrize(
    "entry", ["reasoning", "thinking=1", "reasoning:0=1", "reasoning:x=1", "reasoning=-1", "reasoning=nan"]
)
def test_weights_that_cannot_be_read(entry: str) -> None:
    with pytest.raises(ValueError, match="write reasoning=WEIGHT"):
        parse_turn_weights([entry])


def test_a_weight_of_zero_leaves_out() -> None:
    group = scored(STATES, [1, 0, 1, 0], weights=["reasoning:1=0", "reasoning:3=2"])
    assembly, trained = assembled(group)
    assert [(part.first.number, part.first.weight) for part, _ in trained] == [(3, 2.0)]
    assert [sample.weight for _, samples in trained for sample in samples] == [2.0, 2.0]
    assembly.next_partial_batch(last=True)
    assert rc_rewards.rollout_metrics(assembly.rollouts, assembly.groups)["rc/groups_left_out"] == 1


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_weights_lie_on_the_tokens_of_responses(collate: Any) -> None:
    def sample(weight: float) -> TrainingSample:
        mask = np.array([True, False, True])
        return TrainingSample(
            np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32), mask, np.zeros(3), 1.0, weight
        )

    assert collate([sample(1.0), sample(1.0)], 0).loss_weights is None
    weights = collate([sample(2.0), sample(0.5)], 0).loss_weights
    assert weights.reshape(2, 5).tolist() == [[0, 0, 2, 2, 2], [0, 0, 0.5, 0.5, 0.5]]
    assert weights.dtype == np.float32


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_accuracy_by_cycle() -> None:
    entries = [(REASONING, number, 2 * (number - 1), -1) for number in (1, 2, 3)]
    rollouts = [scored(entries, scores) for scores in ([0, 1, 1], [0, 0, 1], [1, 0, 0], [0, 0, 0])]
    metrics = rc_rewards.evaluation_metrics(rollouts)
    assert [metrics[f"eval/rc/accuracy_cycle_{number}"] for number in (1, 2, 3)] == [0.25, 0.25, 0.5]
    assert metrics["eval/rc/accuracy_any_cycle"] == 0.75
    assert metrics["eval/rc/tokens_cycle_3"] == 4
    assert [part.scores.tolist() for part in rc_rewards.last_turns(rollouts)] == [[1], [1], [0], [0]]


def test_each_of_several_trajectories_counts_on_its_own() -> None:
    """Two trajectories of two cycles for each problem. Of the first problem's, one is right in its second cycle."""
    entries = [(REASONING, number, number - 1, -1) for number in (1, 1, 2, 2)]
    metrics = rc_rewards.evaluation_metrics([scored(entries, [0, 0, 1, 0]), scored(entries, [1, 0, 0, 1])])
    assert metrics["eval/rc/accuracy_any_cycle"] == (0.5 + 1.0) / 2
    assert metrics["eval/rc/accuracy_cycle_2"] == 0.5
    assert metrics["eval/rc/tokens_per_problem"] == 50  # of the 100 that two trajectories took together


def test_a_problem_with_a_turn_that_was_not_scored_says_nothing_of_any_cycle() -> None:
    entries = [(REASONING, number, number - 1, -1) for number in (1, 1, 2, 2)]
    whole, torn = scored(entries, [1, 0, 0, 0]), scored(entries[:3], [1, 0, 1])
    assert rc_rewards.evaluation_metrics([whole, torn])["eval/rc/accuracy_any_cycle"] == 0.5
    metrics = rc_rewards.evaluation_metrics([torn])
    assert "eval/rc/accuracy_any_cycle" not in metrics
    assert metrics["eval/rc/accuracy_cycle_2"] == 1


def test_the_cost_of_an_evaluation_is_that_of_all_turns() -> None:
    entries = [(REASONING, 1, 0, -1), (REASONING, 2, 1, -1)]
    rollouts = [replace(scored(entries, [0, 1]), cost=0.5)]
    metrics = evaluation_metrics(rc_rewards.last_turns(rollouts), verification_reward=1.0, rollouts=rollouts)
    assert metrics["eval/objective/verifier_cost"] == 0.5


def test_trajectory_that_was_given_up_is_right_in_no_cycle() -> None:
    entries = [(REASONING, 1, 0, -1), (REASONING, 2, 1, -1)]
    finished = scored(entries, [0, 1])
    nothing = replace(finished.result, samples=[], error="generation_timeout")
    lost = replace(finished, result=nothing, scores=np.zeros(1, dtype=np.float32))
    [last, stands_for_itself] = rc_rewards.last_turns([finished, lost])
    assert last.first.number == 2
    assert stands_for_itself is lost
    metrics = rc_rewards.evaluation_metrics([finished, lost])
    assert metrics["eval/rc/accuracy_cycle_1"] == 0.0
    assert metrics["eval/rc/accuracy_cycle_2"] == metrics["eval/rc/accuracy_any_cycle"] == 0.5
    assert metrics["eval/rc/tokens_per_problem"] == 100
    assert rc_rewards.evaluation_metrics([lost]) == {}
