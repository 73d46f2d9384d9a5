"""A user's own loss is divided otherwise than the losses that come with the trainer."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.algorithms.denominators import loss_divisor
from open_instruct.algorithms.losses import LOSSES, LossInputs

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/prime-rl #2034",),
    subject="loss and advantages",
    happened="The default loss was divided by the number of tokens and a user's own loss by the number of sequences, so "
    "the same formula, written as an own loss, had another gradient.",
    here="A loss gives a value for each token and never divides. The trainer divides by `--loss_denominator`, whose "
    "default is the number of tokens for any loss that asks for nothing else (`config/grpo_config.py`).",
)


def check(divisor: Callable[[str], float]) -> None:
    """A step of 1000 tokens in 8 responses; `own` is dapo's formula under a user's name."""
    assert divisor("dapo") == 1000
    assert divisor("own") == 1000


def theirs(loss: str) -> float:
    return 1000 if loss == "dapo" else 8


def ours(loss: str) -> float:
    denominator = make_args(loss_fn=loss).denominator
    return loss_divisor(denominator, num_tokens=1000, num_sequences=8, response_length=256)


@pytest.fixture(autouse=True)
def _own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))

    @LOSSES.register("own")
    def own(inputs: LossInputs, options: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        del options
        return -inputs.advantages * inputs.ratio, {}


def test_own_loss_with_another_divisor_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_own_loss_has_the_divisor_of_the_others_here() -> None:
    check(ours)
