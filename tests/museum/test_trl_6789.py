"""Tokens that were sampled from a nucleus are weighed as if they came from the whole vocabulary."""

from collections.abc import Callable

import pytest
import torch
from exhibit import Exhibit

from open_instruct.algorithms.corrections import RhoOptions, compute_rho_correction

EXHIBIT = Exhibit(
    reports=("huggingface/trl #6789",),
    subject="loss and advantages",
    happened="With top-p sampling the engine reported log-probs of the whole distribution, not of the nucleus from which "
    "it had sampled, so the importance ratio did not correct for what sampling had cut off.",
    here="The engine reports log-probs of the distribution that it really sampled from, and rho is the learner's "
    "probability divided by it (`algorithms/corrections.py`): the mass of the nucleus at on-policy tokens.",
)
PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
NUCLEUS = torch.tensor([0, 1])  # top_p 0.7 keeps two tokens, of mass 0.75
SAMPLED = PROBABILITIES[NUCLEUS] / 0.75
Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check(weights_of: Weights) -> None:
    """The mean of weight times value over samples is the value's sum under the policy, over the tokens that can be sampled."""
    values = torch.tensor([3.0, -1.0], dtype=torch.float64)
    mean = (SAMPLED * weights_of(PROBABILITIES[NUCLEUS].log(), SAMPLED.log()) * values).sum()
    torch.testing.assert_close(mean, (PROBABILITIES[NUCLEUS] * values).sum())


def theirs(policy: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    reported = engine + torch.tensor(0.75).log()  # log-probs of the whole distribution
    return (policy - reported).exp()


def ours(policy: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    mask, positions = torch.ones(1, 2, dtype=torch.bool), torch.arange(2)[None]
    return compute_rho_correction(policy[None], engine[None], mask, positions, RhoOptions())[0][0]


def test_ratios_without_the_nucleus_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_weights_correct_for_the_nucleus_here() -> None:
    check(ours)
