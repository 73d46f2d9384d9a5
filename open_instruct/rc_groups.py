"""Rewards and baselines of reasoning-cache rollouts, and the numbers that describe them. Pure.

A result holds the samples of one prompt: reasoning turns, which verifiers score by their answers, and with `--rc_summary_reward`
summaries. Each turn is compared with its own group alone (`Turn.group`): `by_baseline` takes the result apart.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from open_instruct.batch_building import ScoredGroup
from open_instruct.data_types import GenerationResult
from open_instruct.rc_prompts import answer_of, with_opening_tag
from open_instruct.rc_types import REASONING, SUMMARIZATION, SummaryReward, Turn
from open_instruct.rc_weights import TurnWeights, turn_weight


def judged(turns: Sequence[Turn]) -> list[int]:
    """Positions of the turns that a verifier scores. A summary never is one: an answer in it proves nothing of it."""
    return [position for position, turn in enumerate(turns) if turn.turn_type == REASONING]


def answer_to_judge(text: str, *, opens_think: bool) -> str:
    """What was said after the thoughts; empty inside a thought that was never closed."""
    return answer_of(with_opening_tag(text) if opens_think else text)


def scores_of_turns(turns: Sequence[Turn], answer_scores: Sequence[float], summary_reward: SummaryReward) -> np.ndarray:
    """(G,) float32: a reasoning turn has its verifier's score, a summary that of what it led to.

    Args:
        answer_scores: of `judged(turns)`, in order.
        summary_reward: `zero`, or `downstream_mean`: the mean score of the reasoning turns that had the summary in their prompt.
    """
    scores = np.zeros(len(turns), dtype=np.float32)
    scores[judged(turns)] = answer_scores
    if summary_reward == "downstream_mean":
        for position, turn in enumerate(turns):
            if turn.turn_type == SUMMARIZATION:
                scores[position] = fmean([scores[i] for i, other in enumerate(turns) if other.follows == position])
    return scores


def by_baseline(group: ScoredGroup, weights: TurnWeights) -> list[ScoredGroup]:
    """The group taken apart: turns that are compared with each other, as groups of their own."""
    turns = group.result.turns
    members: defaultdict[int, list[int]] = defaultdict(list)
    for position, turn in enumerate(turns):
        members[turn.group].append(position)
    parts: list[ScoredGroup] = []
    once = (group.num_failures, group.cost)  # counted once, with the first turns that a verifier saw
    for positions in members.values():
        first = turns[positions[0]]
        num_failures, cost = once if first.turn_type == REASONING else (0, 0.0)
        parts.append(
            replace(
                group,
                result=_part(group.result, positions),
                query=first.query,
                queries=[turns[position].query for position in positions],
                scores=group.scores[positions],
                num_failures=num_failures,
                cost=cost,
                turn_type=first.turn_type,
                turn_number=first.turn_number,
                weight=turn_weight(weights, first.turn_type, first.turn_number),
            )
        )
        once = (0, 0.0) if first.turn_type == REASONING else once
    return parts


def _part(result: GenerationResult, positions: Sequence[int]) -> GenerationResult:
    responses = [result.responses[position] for position in positions]
    return replace(
        result,
        responses=responses,
        logprobs=[result.logprobs[position] for position in positions],
        finish_reasons=[result.finish_reasons[position] for position in positions],
        version_spans=[result.version_spans[position] for position in positions],
        turns=tuple(result.turns[position] for position in positions),
        token_statistics=replace(
            result.token_statistics, num_response_tokens=sum(len(response) for response in responses)
        ),
    )


def rollout_metrics(rollouts: Sequence[ScoredGroup], parts: Sequence[ScoredGroup]) -> dict[str, float]:
    """`rc/…` of a training step: by turn, what was scored and how long it was; tokens that were spent on the way to the samples.

    Args:
        rollouts: whole results.
        parts: the same taken apart by `by_baseline`.
    """
    metrics: dict[str, float] = {
        "rc/states_reached": fmean([len(one.result.states) for one in rollouts]),
        "rc/tokens_on_the_way": sum(one.result.token_statistics.num_response_tokens for one in rollouts)
        - sum(len(response) for part in parts for response in part.result.responses),
        "rc/groups_of_one": sum(len(part.scores) == 1 for part in parts),
        "rc/groups_left_out": sum(part.weight == 0 for part in parts),
    }
    by_turn: defaultdict[tuple[str, int], list[ScoredGroup]] = defaultdict(list)
    for part in parts:
        by_turn[part.turn_type, part.turn_number].append(part)
    for (turn_type, number), some in sorted(by_turn.items()):
        name = f"{turn_type}_{number}"
        metrics[f"rc/score_{name}"] = float(np.concatenate([part.scores for part in some]).mean())
        metrics[f"rc/tokens_{name}"] = fmean([len(response) for part in some for response in part.result.responses])
        metrics[f"rc/at_limit_{name}"] = fmean(
            [reason == "length" for part in some for reason in part.result.finish_reasons]
        )
    return metrics


def last_turns(rollouts: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Of each evaluated trajectory the last reasoning turn: what an evaluation reports as its answers. A trajectory that was
    given up has no turns and stands for itself."""
    return [
        max(by_baseline(one, {}), key=lambda part: part.turn_number) if one.result.turns else one for one in rollouts
    ]


def evaluation_metrics(rollouts: Sequence[ScoredGroup]) -> dict[str, float]:
    """`eval/rc/…`: the share that is right, and mean tokens of the reasoning turn, by cycle; right in any cycle; at the limit.

    Trajectories that were given up are right in no cycle, and their tokens are not known.
    """
    finished = [one for one in rollouts if one.result.turns]
    if not finished:
        return {}
    by_cycle: defaultdict[int, list[ScoredGroup]] = defaultdict(list)
    for rollout in finished:
        for part in by_baseline(rollout, {}):
            by_cycle[part.turn_number].append(part)
    share_finished = len(finished) / len(rollouts)
    metrics: dict[str, float] = {}
    for number, parts in sorted(by_cycle.items()):
        metrics[f"eval/rc/accuracy_cycle_{number}"] = share_finished * float(
            np.mean([(part.scores >= 1 - 1e-6).mean() for part in parts])
        )
        metrics[f"eval/rc/tokens_cycle_{number}"] = fmean(
            [len(response) for part in parts for response in part.result.responses]
        )
    metrics["eval/rc/accuracy_any_cycle"] = fmean([bool(one.scores.max() >= 1 - 1e-6) for one in rollouts])
    metrics["eval/rc/at_limit"] = fmean(
        [reason == "length" for one in finished for reason in one.result.finish_reasons]
    )
    metrics["eval/rc/tokens_per_problem"] = fmean([one.result.token_statistics.num_response_tokens for one in finished])
    return metrics
