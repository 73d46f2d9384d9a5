"""Rewards and metrics of reasoning-cache rollouts. Pure.

A rollout holds the samples of one prompt: reasoning turns, which verifiers score by their answers, and, with
`--rc_summary_reward`, summaries. Each turn is compared only with its own group (`Sample.group`).
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from open_instruct.data_types import Sample
from open_instruct.scored_groups import ScoredGroup, split
from open_instruct.workflows.rc.prompts import answer_of, with_opening_tag
from open_instruct.workflows.rc.types import SUMMARIZATION, SummaryReward


def answer_to_judge(text: str, *, opens_think: bool) -> str:
    """The text after the thoughts; empty if a thought was never closed."""
    return answer_of(with_opening_tag(text) if opens_think else text)


def rewards_of_turns(
    samples: Sequence[Sample], scores: Sequence[float | None], summary_reward: SummaryReward
) -> list[float | None]:
    """The reward of each turn: the verifier's score for a reasoning turn, `summary_reward` for a summary. None: not scored.

    Args:
        scores: the score of each sample; None for a summary.
        summary_reward: `zero`, or `downstream_mean`: the mean score of the reasoning turns that had the summary in their prompt.
            Turns that were not scored are left out of the mean: scores 1, 0 and None give 0.5.
    """
    rewards = list(scores)
    for position, sample in enumerate(samples):
        if sample.kind == SUMMARIZATION:
            led_to = [scores[i] for i, turn in enumerate(samples) if turn.parent == position]
            turn_scores = [score for score in led_to if score is not None]
            rewards[position] = (
                0.0 if summary_reward != "downstream_mean" else fmean(turn_scores) if turn_scores else None
            )
    return rewards


def rollout_metrics(rollouts: Sequence[ScoredGroup], parts: Sequence[ScoredGroup]) -> dict[str, float]:
    """`rc/…` metrics of a training step: score and length by turn, and the tokens that were spent on the way to the samples.

    Args:
        rollouts: complete results, one for each prompt.
        parts: the same results, divided into groups by `split`.
    """
    metrics: dict[str, float] = {
        "rc/states_reached": fmean([len(rollout.result.notes) for rollout in rollouts]),
        "rc/tokens_on_the_way": sum(rollout.result.token_statistics.num_response_tokens for rollout in rollouts)
        - sum(len(response) for part in parts for response in part.result.responses),
        "rc/groups_of_one": sum(len(part.scores) == 1 for part in parts),
        "rc/groups_left_out": sum(part.first.weight == 0 for part in parts),
    }
    by_turn: defaultdict[tuple[str, int], list[ScoredGroup]] = defaultdict(list)
    for part in parts:
        by_turn[part.first.kind, part.first.number].append(part)
    for (turn_type, number), groups in sorted(by_turn.items()):
        name = f"{turn_type}_{number}"
        metrics[f"rc/score_{name}"] = float(np.concatenate([part.scores for part in groups]).mean())
        metrics[f"rc/tokens_{name}"] = fmean([len(response) for part in groups for response in part.result.responses])
        metrics[f"rc/at_limit_{name}"] = fmean(
            [sample.finish_reason == "length" for part in groups for sample in part.samples]
        )
    return metrics


def last_turns(rollouts: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The last reasoning turn of each evaluated trajectory, which an evaluation reports as the answer. A trajectory that was
    given up has no turns and is returned unchanged."""
    return [
        max(split(rollout), key=lambda part: part.first.number) if rollout.samples else rollout for rollout in rollouts
    ]


def evaluation_metrics(rollouts: Sequence[ScoredGroup]) -> dict[str, float]:
    """`eval/rc/…` metrics: by cycle, the share of right answers and the mean tokens of the reasoning turn; over all cycles, the
    share of trajectories that are right in any cycle, the share of turns that reached the token limit, and the tokens that a
    trajectory spends on its problem, including tokens of summaries.

    A problem has `--eval_pass_at_k` trajectories, and each counts on its own: if one of two trajectories is right in some cycle,
    the share is 0.5. A trajectory that was given up is right in no cycle, and its tokens are not known. A problem with a turn
    that was not scored is left out of the share that is right in any cycle.
    """
    finished = [rollout for rollout in rollouts if rollout.samples]
    if not finished:
        return {}
    by_cycle: defaultdict[int, list[ScoredGroup]] = defaultdict(list)
    for rollout in finished:
        for part in split(rollout):
            by_cycle[part.first.number].append(part)
    share_finished = len(finished) / len(rollouts)
    metrics: dict[str, float] = {}
    for number, parts in sorted(by_cycle.items()):
        metrics[f"eval/rc/accuracy_cycle_{number}"] = share_finished * float(
            np.mean([(part.scores >= 1 - 1e-6).mean() for part in parts])
        )
        metrics[f"eval/rc/tokens_cycle_{number}"] = fmean(
            [len(response) for part in parts for response in part.result.responses]
        )
    matrices = [scores for rollout in finished if (scores := _scores_by_trajectory(rollout)) is not None]
    if matrices:
        shares = [float((scores.max(axis=0) >= 1 - 1e-6).mean()) for scores in matrices]
        metrics["eval/rc/accuracy_any_cycle"] = share_finished * fmean(shares)
    metrics["eval/rc/at_limit"] = fmean(
        [sample.finish_reason == "length" for rollout in finished for sample in rollout.samples]
    )
    metrics["eval/rc/tokens_per_problem"] = fmean(
        [
            rollout.result.token_statistics.num_response_tokens / max(len(part.scores) for part in split(rollout))
            for rollout in finished
        ]
    )
    return metrics


def _scores_by_trajectory(rollout: ScoredGroup) -> np.ndarray | None:
    """(cycles, trajectories): the scores of an evaluated rollout. The trajectories have the same order in every cycle.

    None if a turn was not scored: that turn is missing, so it is not known to which trajectory each other turn belongs.
    """
    by_cycle = [part.scores for part in split(rollout)]
    return np.stack(by_cycle) if len({len(scores) for scores in by_cycle}) == 1 else None
