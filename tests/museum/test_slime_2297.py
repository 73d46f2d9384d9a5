"""Log-probs at temperature 0."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.config.checks import collect_mistakes
from open_instruct.learners.logprobs import chunked_log_probs

EXHIBIT = Exhibit(
    reports=("THUDM/slime #2297", "THUDM/slime #2197"),
    subject="loss and advantages",
    happened="Greedy rollouts were allowed, and the learner divided its logits by the temperature 0: infinities, and no "
    "log-prob that is a number.",
    here="Training needs a temperature of 0.01 or more, the lowest that vLLM samples at; 0 and what is below that are "
    "refused before the run (`option_limits.py`, `config/sampling_checks.py`). Evaluation may be greedy.",
)


Outcome = torch.Tensor | str
"""Log-probs, or why the run is refused before it starts."""


def check(logprobs: Callable[[float], Outcome]) -> None:
    for temperature in (0.0, 0.001, 0.01, 1.0):
        outcome = logprobs(temperature)
        if isinstance(outcome, str):
            assert outcome.startswith("--temperature")
            assert temperature < 0.01
        else:
            assert outcome.isfinite().all(), temperature


HIDDEN_NH, WEIGHT_VH = torch.eye(3), torch.arange(12.0).view(4, 3)
LABELS_N = torch.tensor([0, 1, 3])


def theirs(temperature: float) -> Outcome:
    return (HIDDEN_NH @ WEIGHT_VH.T / temperature).log_softmax(-1)[range(3), LABELS_N]


def ours(temperature: float) -> Outcome:
    mistakes = [mistake for mistake in collect_mistakes(make_args(temperature=temperature)) if "temperature" in mistake]
    if mistakes:
        return mistakes[0]
    return chunked_log_probs(HIDDEN_NH, WEIGHT_VH, LABELS_N, temperature=temperature)[0]


def test_division_by_0_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_greedy_training_is_refused_here() -> None:
    check(ours)
