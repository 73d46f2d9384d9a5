"""The learner's log-probs leave the temperature out."""

from collections.abc import Callable

import pytest
import torch
from exhibit import Exhibit

from open_instruct.learners.logprobs import chunked_log_probs

EXHIBIT = Exhibit(
    reports=("huggingface/trl #4159", "PrimeIntellect-ai/prime-rl #697"),
    subject="loss and advantages",
    happened="Responses were sampled at a temperature other than 1, and the learner computed their log-probs at "
    "temperature 1, so that the ratio compared two different distributions.",
    here="The learner divides the logits by the temperature of the run (`learners/logprobs.py`), and each step "
    "compares its log-probs with the engine's (`debug/vllm_vs_local_logprob_diff_max`).",
)
LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def check(logprobs: LogProbs) -> None:
    hidden_NH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    weight_VH = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    labels_N = torch.tensor([0, 3, 6, 2, 2])
    for temperature in (0.6, 1.0, 1.5):
        powers_NV = ((hidden_NH @ weight_VH.T) / temperature).double().exp()  # what an engine samples from
        sampled_N = (powers_NV / powers_NV.sum(1, keepdim=True))[range(5), labels_N].log().float()
        torch.testing.assert_close(logprobs(hidden_NH, weight_VH, labels_N, temperature), sampled_N)


def theirs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    del temperature
    return (hidden_NH @ weight_VH.T).log_softmax(-1)[range(len(labels_N)), labels_N]


def ours(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, temperature: float) -> torch.Tensor:
    return chunked_log_probs(hidden_NH, weight_VH, labels_N, temperature=temperature)[0]


def test_log_probs_without_the_temperature_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_log_probs_are_those_of_the_sampled_distribution_here() -> None:
    check(ours)
