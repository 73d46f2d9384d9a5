"""Results and groups for tests, column by column."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.data_types import GenerationResult, Sample, TokenStatistics, TrainingSample
from open_instruct.rollouts.training_samples import training_samples
from open_instruct.scored_groups import ScoredGroup

QUERY = np.array([7, 8, 9], dtype=np.int32)


def make_samples(
    *,
    responses: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    finish_reasons: Sequence[str],
    version_spans: Sequence[Sequence[tuple[int, int]]],
    prompt: np.ndarray = QUERY,
) -> list[Sample]:
    columns = zip(responses, logprobs, finish_reasons, version_spans, strict=True)
    return [Sample(prompt, ids, chosen, reason, list(spans)) for ids, chosen, reason, spans in columns]


def ended_by(result: GenerationResult, *reasons: str) -> GenerationResult:
    """The result with other finish reasons."""
    samples = [replace(sample, finish_reason=reason) for sample, reason in zip(result.samples, reasons, strict=True)]
    return replace(result, samples=samples)


def make_result(
    *,
    responses: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    finish_reasons: Sequence[str],
    version_spans: Sequence[Sequence[tuple[int, int]]],
    prompt: np.ndarray = QUERY,
    **fields: Any,
) -> GenerationResult:
    """All samples have the same prompt."""
    samples = make_samples(
        responses=responses,
        logprobs=logprobs,
        finish_reasons=finish_reasons,
        version_spans=version_spans,
        prompt=prompt,
    )
    return GenerationResult(samples=samples, **fields)


def make_group(
    scores: Sequence[float],
    *,
    prompt_id: str = "train-0",
    lengths: Sequence[int] | None = None,
    reasons: Sequence[str] | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    dataset: str = "reasoning_gym/chain_sum",
    num_failures: int = 0,
    seconds: float = 1.0,
    start_time: float = 100.0,
    index: int = 0,
) -> ScoredGroup:
    """Response `i` has `lengths[i]` tokens `10 * i, 10 * i + 1, …`; the query is `[7, 8, 9]`. Without `spans`
    version 0 has sampled all tokens."""
    lengths = lengths or [2] * len(scores)
    result = make_result(
        responses=[np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate(lengths)],
        logprobs=[np.full(n, -0.5 - i, dtype=np.float32) for i, n in enumerate(lengths)],
        finish_reasons=list(reasons or ["stop"] * len(scores)),
        version_spans=[list(spans or [(0, n)]) for n in lengths],
        index=index,
        prompt_id=prompt_id,
        issue_version=0,
        engine_id=0,
        token_statistics=TokenStatistics(3, sum(lengths), seconds, start_time),
    )
    return ScoredGroup(result, dataset, np.array(scores, dtype=np.float32), num_failures)


def make_spanned_group(spans_G: Sequence[Sequence[tuple[int, int]]], **options: Any) -> ScoredGroup:
    """A group whose responses were sampled across updates of the weights, each with spans of its own."""
    lengths = [sum(num for _, num in spans) for spans in spans_G]
    group = make_group([i % 2 for i in range(len(spans_G))], lengths=lengths, **options)
    samples = [replace(sample, version_spans=list(spans)) for sample, spans in zip(group.samples, spans_G, strict=True)]
    return replace(group, result=replace(group.result, samples=samples))


def samples_of(*groups: ScoredGroup, normalization: str = "centered", mask: bool = False) -> list[TrainingSample]:
    """All tokens trained on, with rewards of 10 for a right response."""
    return training_samples(
        groups,
        verification_reward=10.0,
        advantages=partial(group_advantages, name=normalization),
        mask_truncated_completions=mask,
    )


def token_versions(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The version that sampled each token of a response."""
    return [version for version, num in spans for _ in range(num)]


spans_of_a_response = st.lists(st.integers(1, 4), max_size=4).flatmap(
    lambda lengths: st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths), unique=True).map(
        lambda versions: list(zip(sorted(versions), lengths, strict=True))
    )
)


spans_of_a_group = st.lists(spans_of_a_response, min_size=2, max_size=5)
