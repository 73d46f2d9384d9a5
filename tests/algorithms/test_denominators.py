"""What the summed loss is divided by."""

import pytest
from conftest import make_args

from open_instruct.algorithms.denominators import loss_divisor
from open_instruct.algorithms.losses import LOSSES


@pytest.mark.parametrize(
    ("denominator", "divisor"), [("token", 120), ("sequence", 6), ("constant", 6 * 32), (128.0, 128.0)]
)
def test_divisor(denominator: float | str, divisor: float) -> None:
    assert loss_divisor(denominator, num_tokens=120, num_sequences=6, response_length=32) == divisor


@pytest.mark.parametrize("denominator", ["token", "sequence", "constant"])
def test_a_step_without_a_token_is_not_divided_by_0(denominator: str) -> None:
    assert loss_divisor(denominator, num_tokens=0, num_sequences=0, response_length=32) > 0


def test_each_loss_has_the_denominator_that_it_is_meant_to_have() -> None:
    denominators = {name: make_args(loss_fn=name).denominator for name in LOSSES.names}
    assert denominators == {
        "dapo": "token",
        "cispo": "token",
        "dppo_tv": "token",
        "dr_grpo": "constant",
        "grpo": "sequence",
        "gspo": "sequence",
        "gmpo": "sequence",
        "sapo": "sequence",
    }
    assert make_args(loss_fn="gspo", loss_denominator="token").denominator == "token"
