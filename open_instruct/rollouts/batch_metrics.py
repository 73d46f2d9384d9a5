"""Metrics of a training step's batch: rewards, lengths, sizes, ages, stragglers. Pure: arrays in, arrays and floats out."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, MiniBatch, Sample, TrainingSample
from open_instruct.report.histogram import histogram
from open_instruct.rollouts.staleness import sample_age
from open_instruct.scored_groups import ScoredGroup, UnscoredGroup, family, last_samples, stopped_of

SOLVED = 1.0 - 1e-6
"""A score of at least this counts as 1."""


def response_metrics(groups: Sequence[ScoredGroup], *, verification_reward: float) -> dict[str, Any]:
    """Means over all responses of `groups`. `scores` are the rewards after shaping, `*_reward` the weighted rewards of verifiers.
    `*_correct_rate` counts scores above 0, as open-instruct does; `*_solved_rate` counts scores of 1 (up to rounding).

    A conversation of several samples counts once, by its last sample, except that lengths are taken over all samples. A group
    that an evaluation gave up has scores but no responses, so it counts in rewards and rates and not in lengths.
    """
    lengths = _length_metrics([group for group in groups if group.samples])
    groups = last_samples(groups)
    metrics: dict[str, Any] = {
        "scores": float(np.concatenate([group.rewards(verification_reward) for group in groups]).mean()),
        **_function_metrics(groups),
        **lengths,
    }
    if verified := [group for group in groups if group.by_verifier]:
        rewards = verification_reward * np.concatenate([group.weighted_scores for group in verified])
        metrics |= _verifier_metrics("verifiable", rewards, np.concatenate([group.scores for group in verified]))
    if stopped := [group.stopped for group in groups if group.samples]:
        metrics["val/stop_rate"] = float(np.concatenate(stopped).mean())
    if environment_rewards := [group.environment_rewards for group in groups if group.has_environment_rewards]:
        metrics["objective/environment_reward"] = float(np.concatenate(environment_rewards).mean())
    forms = [group.well_formed for group in groups if group.well_formed is not None]
    if forms:
        metrics["val/format_scores"] = float(np.concatenate(forms).mean())
    by_verifier = defaultdict(list)
    for group in groups:
        for part in group.by_verifier:
            by_verifier[part.name].append(part)
    for name, parts in by_verifier.items():
        weighted = verification_reward * np.concatenate([part.weight * part.scores for part in parts])
        metrics |= _verifier_metrics(name, weighted, np.concatenate([part.scores for part in parts]))
    return metrics


def _verifier_metrics(name: str, rewards: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    return {
        f"objective/{name}_reward": float(rewards.mean()),
        f"objective/{name}_correct_rate": float((scores > 0).mean()),
        f"objective/{name}_solved_rate": float((scores >= SOLVED).mean()),
    }


def _function_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """`rewards/<function>/*`: mean and standard deviation (with n - 1, as in TRL) over the responses that the function scored,
    seconds per group, and the means of what it gave to `log_metric`. Empty without reward functions."""
    by_function = defaultdict(list)
    for group in groups:
        for function in group.functions:
            by_function[function.name].append(function)
    metrics: dict[str, float] = {}
    for name, functions in by_function.items():
        rewards = np.concatenate([function.rewards for function in functions])
        rewards = rewards[~np.isnan(rewards)]
        if rewards.size:
            metrics[f"rewards/{name}/mean"] = float(rewards.mean())
        if rewards.size > 1:
            metrics[f"rewards/{name}/std"] = float(rewards.std(ddof=1))
        metrics[f"rewards/{name}/time"] = float(np.mean([function.seconds for function in functions]))
        logged = defaultdict(list)
        for function in functions:
            for key, value in function.logged.items():
                logged[key].append(value)
        metrics |= {f"rewards/{name}/logged/{key}": float(np.mean(values)) for key, values in logged.items()}
    return metrics


def standard_error(groups: Sequence[ScoredGroup], *, verification_reward: float) -> dict[str, float]:
    """`all_groups/scores_standard_error`: how far the mean reward lies from that of all prompts, by chance alone: the standard
    deviation of the groups' mean rewards, divided by the root of their number. Absent for a single group."""
    means = [group.rewards(verification_reward).mean() for group in last_samples(groups)]
    if len(means) < 2:
        return {}
    return {"all_groups/scores_standard_error": float(np.std(means, ddof=1) / len(means) ** 0.5)}


def scoring_metrics(groups: Sequence[ScoredGroup | UnscoredGroup]) -> dict[str, float]:
    """How many responses could not be scored, all together and by verifier, and the cost of scoring in US dollars (absent if it
    cost nothing). All are sums, so the metrics of two sets of groups add up to the metrics of all of them."""
    metrics = {
        "objective/verifier_failures": float(sum(group.num_failures for group in groups)),
        "objective/not_scored": float(sum(group.num_not_scored for group in groups)),
    }
    if (cost := sum(group.cost for group in groups)) > 0:
        metrics["objective/verifier_cost"] = cost
    by_verifier: defaultdict[str, float] = defaultdict(float)
    for misses in (misses for group in groups for misses in group.misses):
        name = f"rewards/{misses.name}/" if misses.is_function else f"objective/{family(misses.name)}_"
        by_verifier[f"{name}not_scored"] += misses.num_not_scored
        by_verifier[f"{name}failures"] += misses.num_failures
    return metrics | by_verifier


def _length_metrics(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Lengths of the responses in tokens; empty if there are no responses."""
    if not groups:
        return {}
    scores = np.concatenate(
        [group.scores if group.by_verifier else np.full(len(group.scores), np.nan) for group in groups]
    )
    lengths = np.array([len(sample.response_ids) for group in groups for sample in group.samples])
    metrics: dict[str, Any] = {
        "val/sequence_lengths": float(lengths.mean()),
        "val/sequence_lengths_min": float(lengths.min()),
        "val/sequence_lengths_max": float(lengths.max()),
    }
    for name, values in {"solved": lengths[scores >= SOLVED], "unsolved": lengths[scores == 0]}.items():
        if values.size:
            metrics[f"val/sequence_lengths_{name}"] = float(values.mean())
            metrics[f"val/sequence_lengths_{name}_hist"] = histogram(values)
    return metrics


def step_metrics(
    groups: Sequence[ScoredGroup],
    batch: Sequence[ScoredGroup],
    *,
    num_prompts: int,
) -> dict[str, Any]:
    """What a training step's batch was made of. `groups` are all groups generated for the step, `batch` are the groups that are
    trained on, and `num_prompts` is the number of prompts that a step should have.

    Generation times are in seconds per group; `batch/*` counts groups. `freshness_metrics` says how old the data is.
    """
    is_kept = set(map(id, batch))
    dropped = [group for group in groups if id(group) not in is_kept]
    alike = [group for group in dropped if group.has_zero_std]
    num_zero = sum(1 for group in alike if _best(group) <= 0)
    num_solved = sum(1 for group in alike if is_right(group).all())
    statistics = [group.result.token_statistics for group in groups]
    last_end = max(stats.start_time + stats.generation_time for stats in statistics)
    num_response_tokens = sum(group.result.token_statistics.num_response_tokens for group in batch)
    return {
        "batch/total_prompts": len(batch),
        "batch/filtered_prompts": len(dropped),
        "batch/filtered_prompts_zero": num_zero,
        "batch/filtered_prompts_solved": num_solved,
        "batch/filtered_prompts_nonzero": len(alike) - num_zero - num_solved,
        "batch/filtered_prompts_pct": len(dropped) / len(groups),
        "all_groups/total_prompts": len(groups),
        "real_batch_size_ratio": len(batch) / num_prompts,
        "val/total_reward_groups": len(batch),
        "val/num_step_tokens": num_response_tokens + sum(map(_num_prompt_tokens, batch)),
        "val/num_step_response_tokens": num_response_tokens,
        "time/generation": last_end - min(stats.start_time for stats in statistics),
        **_solved_metrics(last_samples(groups), last_samples(batch)),
        **_size_metrics(batch),
    }


def _solved_metrics(groups: Sequence[ScoredGroup], batch: Sequence[ScoredGroup]) -> dict[str, Any]:
    """How much of the groups is solved; empty if only reward functions score, which do not say what is right."""
    if not all(group.by_verifier for group in groups):
        return {}
    batch_scores = [group.scores for group in batch]
    unsolved = [scores for scores in batch_scores if not scores.max() >= SOLVED]
    solved_shares = [float(scores.mean()) for scores in batch_scores]
    return {
        "batch/percent_solved_mean": float(np.mean(solved_shares)),
        "batch/percent_solved_hist": histogram(solved_shares),
        "batch/unsolved_groups_ratio": len(unsolved) / len(batch),
        "all_groups/percent_solved_mean": float(np.mean([is_right(group).mean() for group in groups])),
        "unsolved_batch_size_ratio": float(np.mean(np.concatenate(batch_scores) < SOLVED)),
        "val/solve_rate_hist": histogram(solved_shares),
    }


def is_right(group: ScoredGroup) -> np.ndarray:
    """(G,) bool: the verifier's score, the environment's reward, or where only reward functions score their weighted sum, is at
    least 1 (up to rounding)."""
    verdicts = group.outcomes >= SOLVED
    return verdicts | (group.environment_rewards >= SOLVED) if group.has_environment_rewards else verdicts


def _best(group: ScoredGroup) -> float:
    """The highest verdict of a verifier, an environment or the reward functions."""
    added = group.environment_rewards.max() if group.has_environment_rewards else -np.inf
    return float(max(group.outcomes.max(), added))


def _num_prompt_tokens(group: ScoredGroup) -> int:
    """Each prompt counts once, however many responses it has."""
    return sum(map(len, {sample.prompt_ids.tobytes(): sample.prompt_ids for sample in group.samples}.values()))


def _size_metrics(batch: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Lengths of prompts and responses in tokens, and seconds per group."""
    values = {
        "batch/prompt_lengths": [len(group.first.prompt_ids) for group in batch],
        "batch/response_lengths": [len(sample.response_ids) for group in batch for sample in group.samples],
        "batch/per_group_generation_times": [group.result.token_statistics.generation_time for group in batch],
    }
    times = values["batch/per_group_generation_times"]
    return {
        **{name: histogram(numbers) for name, numbers in values.items()},
        "batch/prompt_lengths_mean": float(np.mean(values["batch/prompt_lengths"])),
        "batch/response_lengths_mean": float(np.mean(values["batch/response_lengths"])),
        "time/group_generation_mean": float(np.mean(times)),
        "time/group_generation_min": min(times),
        "time/group_generation_max": max(times),
        "val/actor_tokens_per_second": tokens_per_second(batch),
    }


def tokens_per_second(groups: Sequence[ScoredGroup]) -> float:
    """Tokens of all prompts and responses, divided by the seconds of the slowest group, as open-instruct computes it."""
    slowest = max(group.result.token_statistics.generation_time for group in groups)
    num_tokens = sum(_num_prompt_tokens(group) + group.result.token_statistics.num_response_tokens for group in groups)
    return num_tokens / max(slowest, 1e-9)


def freshness_metrics(
    training_step: int,
    groups: Sequence[ScoredGroup],
    oldest_trained_versions: Sequence[int],
    *,
    now: float,
    mask_truncated_completions: bool = False,
) -> dict[str, float]:
    """Ages of the samples trained on, in training steps, and seconds from the end of their group's generation to Unix time `now`.

    The names are those of the fully async policy. A sample is a response. Its age is that of its oldest trained token, and a
    sample is stale if its age is more than 1 step. `freshness/avg_token_age` counts each trained token at its own version, and
    `model_step_max` is the newest version. `model_step_min`, `model_step_mean`, `num_steps_off_policy` (mean) and
    `num_steps_off_policy_max` are taken over the oldest trained token of each group: in training step 5 a group whose oldest
    trained token is of version 3 is one step off policy. Masked samples have no age.

    Args:
        oldest_trained_versions: per group; tokens of older weights are not trained on (see `fresh_masks`).
    """
    spans_per_group = [
        _trained_spans(group.result, oldest, mask_truncated_completions=mask_truncated_completions)
        for group, oldest in zip(groups, oldest_trained_versions, strict=True)
    ]
    if not any(spans_per_group):  # all responses were cut off and are masked, so the ages of their groups are used
        spans_per_group = [[[(oldest, 1)]] for oldest in oldest_trained_versions]
    oldest_versions = [min(min(spans)[0] for spans in group_spans) for group_spans in spans_per_group if group_spans]
    sample_spans = [spans for group_spans in spans_per_group for spans in group_spans]
    ages = np.array([sample_age(training_step, min(spans)[0]) for spans in sample_spans])
    versions, num_tokens = np.array([span for spans in sample_spans for span in spans]).T
    ends = [
        group.result.token_statistics.start_time + group.result.token_statistics.generation_time for group in groups
    ]
    latencies = np.repeat(now - np.array(ends), [len(group_spans) for group_spans in spans_per_group])
    freshness = {
        "avg_sample_age": float(ages.mean()),
        "max_sample_age": int(ages.max()),
        "min_sample_age": int(ages.min()),
        "stale_samples_ratio": float((ages > 1).mean()),
    }
    return {
        **freshness,
        **{f"freshness/{name}": value for name, value in freshness.items()},
        **_kv_metrics(groups),
        "freshness/avg_token_age": float(np.average(training_step - 1 - versions, weights=num_tokens)),
        "freshness/avg_sample_latency": float(latencies.mean()),
        "freshness/max_sample_latency": float(latencies.max()),
        "version_diversity": len(set(versions.tolist())),
        "num_steps_off_policy": training_step - 1 - float(np.mean(oldest_versions)),
        "num_steps_off_policy_max": training_step - 1 - min(oldest_versions),
        "model_step_min": min(oldest_versions),
        "model_step_mean": float(np.mean(oldest_versions)),
        "model_step_max": int(versions.max()),
    }


def _kv_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Ages of the key-value cache that responses were sampled with (`Sample.kv_age`); empty if no engine reported them."""
    ages = [sample.kv_age for group in groups for sample in group.samples if sample.kv_age is not None]
    return {"kv_age/mean": float(np.mean(ages)), "kv_age/max": max(ages)} if ages else {}


def _trained_spans(
    result: GenerationResult, oldest_trained_version: int, *, mask_truncated_completions: bool
) -> list[list[tuple[int, int]]]:
    """Per response that is trained on, `(weight version, number of tokens)` of its trained tokens."""
    fresh = [
        [(version, num) for version, num in _sampled_spans(sample) if version >= oldest_trained_version and num]
        for sample in result.samples
    ]
    return [
        spans
        for spans, stops in zip(fresh, stopped_of(result.samples), strict=True)
        if spans and (stops or not mask_truncated_completions)
    ]


def _sampled_spans(sample: Sample) -> list[tuple[int, int]]:
    """`(weight version, number of tokens)` of the tokens that the policy sampled."""
    if sample.loss_mask is None:
        return sample.version_spans
    ends = np.cumsum([0, *(num for _, num in sample.version_spans)])
    counts = [int(sample.loss_mask[begin:end].sum()) for begin, end in itertools.pairwise(ends)]
    return [(version, count) for (version, _), count in zip(sample.version_spans, counts, strict=True)]


def straggler_metrics(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Which groups were slow: seconds per group in each phase, and the identity of the group that took longest in total.

    `agent_loop/tool_calls/*` are seconds in which a group waited only for tools. `agent_loop/slowest/response_length` is the
    length of the slowest group's longest response. `agent_loop/num_preempted/*` covers the groups whose engine reported the
    number, and is absent if no engine did.
    """
    statistics = [group.result.token_statistics for group in groups]
    phases = {
        "generate_sequences": np.array([stats.generation_time - stats.tool_time for stats in statistics]),
        "tool_calls": np.array([stats.tool_time for stats in statistics]),
        "compute_score": np.array([group.score_s for group in groups]),
    }
    slowest = int(np.argmax(sum(phases.values())))
    metrics: dict[str, Any] = {}
    for name, values in phases.items():
        metrics |= _distribution(f"agent_loop/{name}", values)
        metrics[f"agent_loop/slowest/{name}"] = float(values[slowest])
    preemptions = np.array([stats.num_preempted for stats in statistics if stats.num_preempted is not None])
    metrics |= _distribution("agent_loop/num_preempted", preemptions) if preemptions.size else {}
    if (num_preempted := statistics[slowest].num_preempted) is not None:
        metrics["agent_loop/slowest/num_preempted"] = num_preempted
    result = groups[slowest].result
    return metrics | {
        "agent_loop/slowest/prompt_length": len(groups[slowest].first.prompt_ids),
        "agent_loop/slowest/response_length": max(len(response) for response in result.responses),
        "agent_loop/slowest/prompt_id": result.prompt_id,
        "agent_loop/slowest/engine_id": result.engine_id,
    }


def _distribution(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
        f"{name}/mean": float(values.mean()),
        **{f"{name}/p{q}": float(np.percentile(values, q)) for q in (50, 95)},
    }


class OverIssueBias:
    """Measures over the whole run how much shorter the responses are in groups that a step took first than in stragglers, which a
    step left to a later step."""

    def __init__(self) -> None:
        self._lengths: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
        self._num_stragglers = 0

    def record(self, group: ScoredGroup, *, is_straggler: bool) -> None:
        total = self._lengths[is_straggler]
        total[0] += sum(map(len, group.result.responses))
        total[1] += len(group.samples)
        self._num_stragglers += is_straggler

    def metrics(self) -> dict[str, float]:
        """Number of stragglers so far, and mean response lengths in tokens; empty before the first straggler."""
        if not self._num_stragglers:
            return {}
        mean = {is_straggler: tokens / max(number, 1) for is_straggler, (tokens, number) in self._lengths.items()}
        return {
            "over_issue/num_stragglers": self._num_stragglers,
            "over_issue/response_length_taken": mean[False],
            "over_issue/response_length_left": mean[True],
        }


def advantage_metrics(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Advantages of the responses of a batch. Each response counts once, whatever its length, and whether it is one sample or a
    conversation of several samples."""
    advantages = np.array([sample.advantage for sample in samples if not sample.goes_on])
    return {
        "val/advantages_mean": float(advantages.mean()),
        "val/advantages_min": float(advantages.min()),
        "val/advantages_max": float(advantages.max()),
        "val/advantages_hist": histogram(advantages),
    }


def num_packed_rows(rank_batches: Sequence[Sequence[MiniBatch]]) -> int:
    """Number of rows with at least one trained token."""
    return sum(
        int(micro_batch.response_masks.any(axis=1).sum())
        for batches in rank_batches
        for mini_batch in batches
        for micro_batch in mini_batch.micro_batches
    )


def num_computed_tokens(rank_batches: Sequence[Sequence[MiniBatch]]) -> int:
    """Number of tokens that the learners compute, including padding and filling rows."""
    return sum(
        micro_batch.query_responses.size
        for batches in rank_batches
        for mini_batch in batches
        for micro_batch in mini_batch.micro_batches
    )
