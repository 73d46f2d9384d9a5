"""Exact merging of what is measured per micro-batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.algorithms.metric_merging import finish_logprob_difference, merge_logprob_differences
from open_instruct.algorithms.mismatch import logprob_difference_sums

log_probs = st.floats(-30, 0, width=32)
rows_of_tokens = st.lists(st.tuples(log_probs, log_probs, st.booleans()), min_size=1, max_size=12)


def as_row(row: list[tuple[float, float, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new, vllm, mask = zip(*row, strict=True)
    return torch.tensor([new]), torch.tensor([vllm]), torch.tensor([mask])


@settings(deadline=None)
@given(rows=st.lists(rows_of_tokens, min_size=1, max_size=6), split=st.integers(1, 6))
def test_logprob_difference_is_exact_over_micro_batches_and_ranks(rows, split: int) -> None:
    parts = [logprob_difference_sums(*as_row(row)) for row in rows]
    ranks = [merge_logprob_differences(rank) for rank in (parts[:split], parts[split:]) if rank]
    metrics = finish_logprob_difference(ranks)

    signed = np.array([vllm - new for row in rows for new, vllm, mask in row if mask] or [0.0])
    absolute = np.abs(signed)
    assert metrics == pytest.approx(
        {
            "debug/vllm_vs_local_logprob_diff_mean": absolute.mean(),
            "debug/vllm_vs_local_logprob_diff_max": absolute.max(),
            "debug/vllm_vs_local_logprob_diff_std": absolute.std(),
            "debug/vllm_local_reverse_kl": signed.mean(),
        },
        rel=1e-6,
        abs=1e-6,
    )


def test_logprob_difference_ignores_what_stands_outside_the_mask() -> None:
    new, vllm = torch.tensor([[-1.0, math.nan, -math.inf]]), torch.tensor([[-1.5, 0.0, -math.inf]])
    metrics = finish_logprob_difference([logprob_difference_sums(new, vllm, torch.tensor([[True, False, False]]))])
    assert metrics["debug/vllm_vs_local_logprob_diff_mean"] == 0.5
    assert metrics["debug/vllm_local_reverse_kl"] == -0.5


def test_a_nan_among_trained_tokens_shows_in_every_metric() -> None:
    good = logprob_difference_sums(*as_row([(-1.0, -1.0, True)]))
    bad = logprob_difference_sums(*as_row([(math.nan, -1.0, True)]))
    for parts in ([good, bad], [bad, good]):
        assert all(math.isnan(value) for value in finish_logprob_difference(parts).values())


def test_the_reverse_kl_is_the_kl_of_the_engine_to_the_learner_in_expectation() -> None:
    """Tokens in the proportions in which the engine samples them."""
    vllm, local = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    sampled = torch.tensor([[0, 0, 1, 2]])
    sums = logprob_difference_sums(local[sampled], vllm[sampled], torch.ones_like(sampled, dtype=torch.bool))
    expected = (vllm.exp() * (vllm - local)).sum().item()
    assert finish_logprob_difference([sums])["debug/vllm_local_reverse_kl"] == pytest.approx(expected)
