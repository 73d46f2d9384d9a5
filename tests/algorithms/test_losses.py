"""Each loss against its definition."""

import math

import pytest
import torch

from open_instruct.algorithms.losses import LOSSES, ClipOptions, dapo_loss
from open_instruct.algorithms.objective import make_loss_inputs


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 1.0, -1.272, True),  # a good token, already much likelier: no more to earn
        (1.5, -1.0, 1.5, False),  # a bad token that became likelier is pushed back in full
        (0.5, -1.0, 0.8, True),  # a bad token, already much less likely
        (0.5, 1.0, -0.5, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_dapo_loss_clips_on_the_side_that_earns(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    inputs = make_loss_inputs(
        new_logprobs=new,
        old_logprobs=torch.zeros(1, 1),
        behaviour_logprobs=torch.zeros(1, 1),
        ref_logprobs=None,
        advantages=torch.tensor([[advantage]]),
        mask=torch.tensor([[True]]),
        position_ids=torch.tensor([[1]]),
    )
    assert inputs.ratio.item() == pytest.approx(ratio)
    got_loss, metrics = dapo_loss(inputs, ClipOptions())
    assert got_loss.item() == pytest.approx(loss)
    assert metrics["policy/clipfrac_avg"].item() is clipped
    got_loss.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_loss_functions_are_found_by_the_name_of_the_option() -> None:
    assert LOSSES["dapo"].value is dapo_loss
    assert LOSSES["dapo"].options is ClipOptions
