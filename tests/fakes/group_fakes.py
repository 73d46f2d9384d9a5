"""Results and groups for tests, column by column."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, Sample

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
