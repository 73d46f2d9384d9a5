"""From scored groups to training samples, and the numbers that describe them. Pure: arrays in, arrays and floats out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from open_instruct.data_types import GenerationResult, MiniBatch, TrainingSample
from open_instruct.rl_utils import calculate_group_advantages
from open_instruct.staleness import sample_age


@dataclass(frozen=True)
class ScoredGroup:
    """The G responses to one prompt with what the verifier said of them."""

    result: GenerationResult
    query: np.ndarray  # (Q,) int32
    dataset: str
    scores: np.ndarray  # (G,) float32 in [0, 1]
    num_failures: int
    """Responses whose verifier timed out, crashed or raised; they score 0."""

    @property
    def has_zero_std(self) -> bool:
        """Whether all responses scored alike: their advantages are all 0 and teach nothing."""
        return bool(np.all(self.scores == self.scores[0]))


def training_samples(
    groups: Sequence[ScoredGroup],
    *,
    verification_reward: float,
    advantage_normalization_type: str,
    mask_truncated_completions: bool,
) -> list[TrainingSample]:
    """One sample per response, with the advantage of its reward within its group, in the order of `groups`.

    With `mask_truncated_completions` responses that did not end by themselves count in their group's baseline, but no token of
    theirs is trained on; they are left out.
    """
    rewards_PG = verification_reward * np.stack([group.scores for group in groups])
    advantages_PG = calculate_group_advantages(rewards_PG, advantage_normalization_type)
    return [
        TrainingSample(
            query=group.query,
            response=response,
            mask=np.ones(len(response), dtype=bool),
            logprobs=logprobs,
            advantage=float(advantage),
        )
        for group, advantages in zip(groups, advantages_PG, strict=True)
        for response, logprobs, reason, advantage in zip(
            group.result.responses, group.result.logprobs, group.result.finish_reasons, advantages, strict=True
        )
        if len(response) and (reason == "stop" or not mask_truncated_completions)
    ]


def response_metrics(groups: Sequence[ScoredGroup], *, verification_reward: float) -> dict[str, float]:
    """Means over all responses of `groups`. `*_correct_rate` counts scores of 1 (up to rounding) as correct."""
    scores = np.concatenate([group.scores for group in groups])
    lengths = np.array([len(response) for group in groups for response in group.result.responses])
    stopped = [reason == "stop" for group in groups for reason in group.result.finish_reasons]
    correct = scores >= 1.0 - 1e-6
    metrics = {
        "scores": float(verification_reward * scores.mean()),
        "objective/verifiable_reward": float(verification_reward * scores.mean()),
        "objective/verifiable_correct_rate": float(correct.mean()),
        "objective/verifier_failures": float(sum(group.num_failures for group in groups)),
        "val/stop_rate": float(np.mean(stopped)),
        "val/sequence_lengths": float(lengths.mean()),
        "val/sequence_lengths_min": float(lengths.min()),
        "val/sequence_lengths_max": float(lengths.max()),
    }
    if correct.any():
        metrics["val/sequence_lengths_solved"] = float(lengths[correct].mean())
    if not correct.all():
        metrics["val/sequence_lengths_unsolved"] = float(lengths[~correct].mean())
    by_verifier = defaultdict(list)
    for group in groups:
        by_verifier[group.dataset.partition("/")[0].partition("?")[0]].append(group.scores)
    for name, parts in by_verifier.items():
        own = np.concatenate(parts)
        metrics[f"objective/{name}_reward"] = float(verification_reward * own.mean())
        metrics[f"objective/{name}_correct_rate"] = float((own >= 1.0 - 1e-6).mean())
    return metrics


def step_metrics(
    training_step: int, groups: Sequence[ScoredGroup], kept: Sequence[ScoredGroup], *, num_prompts: int
) -> dict[str, float]:
    """What a training step's batch was made of. `groups` are all groups generated for the step, `kept` those trained on.

    Ages are of the kept groups, in training steps; generation times in seconds per group; `batch/*` counts groups.
    """
    kept_ids = {group.result.prompt_id for group in kept}
    dropped = [group for group in groups if group.result.prompt_id not in kept_ids]
    ages = [sample_age(training_step, group.result.oldest_version) for group in kept]
    versions = [group.result.oldest_version for group in kept]
    statistics = [group.result.token_statistics for group in groups]
    times = [one.generation_time for one in statistics]
    last_end = max(one.start_time + one.generation_time for one in statistics)
    unsolved = [group for group in kept if not group.scores.max() >= 1.0 - 1e-6]
    return {
        "batch/total_prompts": len(groups),
        "batch/filtered_prompts": len(dropped),
        "batch/filtered_prompts_zero": sum(bool(group.scores[0] == 0) for group in dropped),
        "batch/filtered_prompts_solved": sum(bool(group.scores[0] >= 1.0 - 1e-6) for group in dropped),
        "batch/filtered_prompts_pct": len(dropped) / len(groups),
        "batch/percent_solved_mean": float(np.mean([(g.scores >= 1.0 - 1e-6).mean() for g in groups])),
        "batch/prompt_lengths": float(np.mean([len(group.query) for group in groups])),
        "batch/response_lengths": float(np.mean([len(r) for group in groups for r in group.result.responses])),
        "real_batch_size_ratio": len(kept) / num_prompts,
        "unsolved_batch_size_ratio": len(unsolved) / len(kept),
        "val/num_step_tokens": sum(group.result.token_statistics.num_response_tokens for group in kept),
        "num_steps_off_policy": max(ages),
        "model_step_min": min(versions),
        "model_step_max": max(
            (span[0] for group in kept for spans in group.result.version_spans for span in spans), default=max(versions)
        ),
        "model_step_mean": float(np.mean(versions)),
        "stale_results_dropped": 0,
        "time/generation": last_end - min(one.start_time for one in statistics),
        "time/group_generation_mean": float(np.mean(times)),
        "time/group_generation_min": min(times),
        "time/group_generation_max": max(times),
    }


def advantage_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Over the samples of a batch, each counted once whatever its length."""
    advantages = np.array([sample.advantage for sample in samples])
    return {
        "val/advantages_mean": float(advantages.mean()),
        "val/advantages_min": float(advantages.min()),
        "val/advantages_max": float(advantages.max()),
    }


def packed_ratio(rank_batches: Sequence[Sequence[MiniBatch]], samples: Sequence[TrainingSample]) -> float:
    """Real tokens over the tokens that the learners compute, padding and filling rows included."""
    computed = sum(
        micro_batch.query_responses.size
        for batches in rank_batches
        for mini_batch in batches
        for micro_batch in mini_batch.micro_batches
    )
    return sum(len(sample) for sample in samples) / computed


def evaluation_metrics(groups: Sequence[ScoredGroup], *, verification_reward: float) -> dict[str, float]:
    """`eval/*` over all prompts of one evaluation; `eval/scores` is the mean reward, `eval/pass_at_1` the share correct."""
    metrics = response_metrics(groups, verification_reward=verification_reward)
    renamed = {f"eval/{key.removeprefix('val/')}": value for key, value in metrics.items()}
    renamed["eval/pass_at_1"] = metrics["objective/verifiable_correct_rate"]
    started = min(group.result.token_statistics.start_time for group in groups)
    ended = max(
        group.result.token_statistics.start_time + group.result.token_statistics.generation_time for group in groups
    )
    num_tokens = sum(group.result.token_statistics.num_response_tokens for group in groups)
    renamed["eval/actor_tokens_per_second"] = num_tokens / max(ended - started, 1e-9)
    return renamed
