"""Metrics of an evaluation: pass@k, rewards, speed. Pure: arrays in, floats out."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_instruct.rollouts.batch_metrics import is_right, response_metrics, scoring_metrics, tokens_per_second
from open_instruct.scored_groups import ScoredGroup

SOLVED = 1.0 - 1e-6
"""A score of at least this counts as 1."""


def pass_at_k_metrics(correct: Sequence[np.ndarray]) -> dict[str, float]:
    """`eval/pass_at_1` is the share of right responses. With n responses to a prompt, `eval/pass_at_<n>` is the share of prompts
    with at least one right response, and for k = 1, 2, 4, … `eval/pass_at_<k>_unbiased` is 1 - C(n - c, k) / C(n, k) for c right
    responses of n (Chen et al., arXiv:2107.03374, eq. 1), averaged over prompts.

    Args:
        correct: for each prompt (n,) bool. A prompt with n < k responses counts with k = n.
    """
    metrics = {"eval/pass_at_1": float(np.mean([verdicts.mean() for verdicts in correct]))}
    num_responses = max(map(len, correct))
    if num_responses > 1:
        metrics[f"eval/pass_at_{num_responses}"] = float(np.mean([verdicts.any() for verdicts in correct]))
        for k in (2**power for power in range(num_responses.bit_length())):
            metrics[f"eval/pass_at_{k}_unbiased"] = float(
                np.mean([_pass_at(k, len(verdicts), int(verdicts.sum())) for verdicts in correct])
            )
    return metrics


def standard_error(correct: Sequence[np.ndarray]) -> dict[str, float]:
    """`eval/pass_at_1_standard_error`: how far `eval/pass_at_1` lies from that of all questions of the kind, by chance alone: the
    standard deviation over prompts, divided by the root of their number. Empty for a single prompt.

    Args:
        correct: for each prompt (n,) bool.
    """
    if len(correct) < 2:
        return {}
    shares = [verdicts.mean() for verdicts in correct]
    return {"eval/pass_at_1_standard_error": float(np.std(shares, ddof=1) / math.sqrt(len(shares)))}


def _pass_at(k: int, n: int, c: int) -> float:
    k = min(k, n)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluation_metrics(
    groups: Sequence[ScoredGroup], *, verification_reward: float, rollouts: Sequence[ScoredGroup] | None = None
) -> dict[str, Any]:
    """`eval/*` over all prompts of one evaluation. `eval/scores` is the mean reward, `eval/pass_at_1` the share of right answers,
    which is not known where only reward functions score.

    Prompts that were given up count as wrong in both, and `eval/num_given_up` is their number. If they were left out, two
    evaluations would cover different prompts, and the evaluation with the shorter time limit would look better. Where `groups`
    are only the last turns, `rollouts` are all turns; scoring cost is computed from `rollouts`.
    """
    rollouts = groups if rollouts is None else rollouts
    metrics = response_metrics(groups, verification_reward=verification_reward) | scoring_metrics(rollouts)
    renamed = {f"eval/{key.removeprefix('val/')}": value for key, value in metrics.items()}
    if all(group.by_verifier for group in groups):  # reward functions do not say what is right
        correct = [is_right(group) for group in groups]
        renamed |= pass_at_k_metrics(correct) | standard_error(correct)
    renamed["eval/num_given_up"] = sum(not group.samples for group in groups)
    return renamed


def speed_metrics(rollouts: Sequence[ScoredGroup]) -> dict[str, float]:
    """Tokens per second of an evaluation; empty if nothing was answered."""
    groups = [rollout for rollout in rollouts if rollout.samples]
    if not groups:
        return {}
    statistics = [rollout.result.token_statistics for rollout in groups]
    start = min(stats.start_time for stats in statistics)
    end = max(stats.start_time + stats.generation_time for stats in statistics)
    num_tokens = sum(stats.num_response_tokens for stats in statistics)
    return {
        "eval/actor_tokens_per_second": tokens_per_second(groups),
        "eval/response_tokens_per_second": num_tokens / max(end - start, 1e-9),
    }
