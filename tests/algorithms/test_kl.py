"""Estimates of the KL divergence."""

import torch

from open_instruct.algorithms.kl import estimate_kl

VOCAB = 37


def test_estimate_kl_formulas() -> None:
    d, ratio = torch.tensor([[-0.5, 0.0, 2.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    k1, k2, k3, weighted, unbiased = estimate_kl(d, ratio)
    torch.testing.assert_close(k1, d)
    torch.testing.assert_close(k2, torch.tensor([[0.125, 0.0, 2.0]]))
    torch.testing.assert_close(k3, torch.exp(-d) - 1 + d)
    torch.testing.assert_close(unbiased, ratio * k3)
    torch.testing.assert_close(weighted, torch.tensor([[-0.5, 0.0, 6.0]]))
    assert torch.isfinite(estimate_kl(torch.tensor([[-1e9, 1e9]]), torch.ones(1, 2))).all()


def test_kl_estimators_agree_with_the_true_kl_in_expectation() -> None:
    """Over all tokens of a distribution, weighted with their probabilities, k1 and k3 are the KL exactly."""
    generator = torch.Generator().manual_seed(0)
    logp, logq = torch.randn(2, 1, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    kl = (logp.exp() * (logp - logq)).sum()
    k1, _, k3, weighted, unbiased = (logp.exp() * estimate_kl(logp - logq, torch.ones_like(logp))).sum(-1)
    for estimate in (k1, k3, weighted, unbiased):
        torch.testing.assert_close(estimate.squeeze(), kl)
