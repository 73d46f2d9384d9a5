"""Each loss against its definition."""

import math

import pytest
import torch

from open_instruct.algorithms.losses import LOSSES, ClipOptions, dapo_loss
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs, weights_of_sequences


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


# --- every loss -------------------------------------------------------------------------------------------------------

LENGTHS = [5, 1, 9, 3, 7]
TRUE_GRADIENTS = ["dapo", "grpo", "dr_grpo", "gmpo", "sapo"]
"""Losses without a stop-gradient, whose gradient finite differences can measure."""


def make_sequences(*, spread: float) -> list[dict[str, torch.Tensor]]:
    """Sequences of random log-probs, each (1, T), with a prompt of two tokens, which hold nonsense."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in LENGTHS:
        old = -torch.rand(1, length, generator=generator, dtype=torch.float64) * 3
        arrays = {
            "old_logprobs": old,
            "new_logprobs": old + spread * torch.randn(1, length, generator=generator, dtype=torch.float64),
            "behaviour_logprobs": old + spread * torch.randn(1, length, generator=generator, dtype=torch.float64),
            "advantages": torch.randn(1, 1, generator=generator, dtype=torch.float64).expand(1, length),
            "mask": torch.ones(1, length, dtype=torch.bool),
        }
        sequences.append(
            {
                name: torch.cat([torch.full((1, 2), 0 if name == "mask" else torch.nan).to(array.dtype), array], 1)
                for name, array in arrays.items()
            }
            | {"position_ids": torch.arange(1, length + 3)[None]}
        )
    return sequences


def packed(sequences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([sequence[name] for sequence in sequences], 1) for name in sequences[0]}


def padded(sequences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(sequence["mask"].shape[1] for sequence in sequences)

    def fill(name: str, row: torch.Tensor) -> torch.Tensor:
        room = width - row.shape[1]
        if name == "position_ids":
            return torch.arange(1, width + 1)[None]
        return torch.cat([row, torch.full((1, room), 0 if name == "mask" else torch.nan).to(row.dtype)], 1)

    return {name: torch.cat([fill(name, sequence[name]) for sequence in sequences]) for name in sequences[0]}


def summed_loss(batch: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss as its denominator asks, before the division, and its gradient on the trained tokens, flat."""
    entry = LOSSES[name]
    new = batch["new_logprobs"].clone().requires_grad_()
    inputs = make_loss_inputs(**(batch | {"new_logprobs": new}), ref_logprobs=None)
    by_sequence = entry.facts.get("denominator") == "sequence"
    total, _ = compute_objective(
        inputs,
        lambda inputs: entry.value(inputs, entry.options()),
        beta=0.0,
        kl_estimator=2,
        loss_weights=weights_of_sequences(inputs.mask, inputs.sequence_ids) if by_sequence else None,
    )
    total.backward()
    assert new.grad is not None
    return total.detach(), new.grad[batch["mask"]]


@pytest.mark.parametrize("name", LOSSES.names)
def test_packed_padded_and_one_by_one_are_the_same(name: str) -> None:
    sequences = make_sequences(spread=0.5)
    alone = [summed_loss(sequence, name) for sequence in sequences]
    expected = sum(total for total, _ in alone), torch.cat([gradient for _, gradient in alone])
    for layout in (packed, padded):
        torch.testing.assert_close(summed_loss(layout(sequences), name), expected, rtol=1e-6, atol=1e-9)
    halves = [summed_loss(packed(sequences[:2]), name), summed_loss(padded(sequences[2:]), name)]
    torch.testing.assert_close(halves[0][0] + halves[1][0], expected[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES.names)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    batch = packed(make_sequences(spread=0.0))
    _, gradient = summed_loss(batch, name)
    expected = -batch["advantages"][batch["mask"]]
    if LOSSES[name].facts.get("denominator") == "sequence":
        expected = expected / torch.tensor([length for length in LENGTHS for _ in range(length)])
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TRUE_GRADIENTS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    batch = packed(make_sequences(spread=0.5))
    entry = LOSSES[name]

    def loss(new: torch.Tensor) -> torch.Tensor:
        inputs = make_loss_inputs(**(batch | {"new_logprobs": new}), ref_logprobs=None)
        return (entry.value(inputs, entry.options())[0] * inputs.mask).sum()

    assert torch.autograd.gradcheck(loss, (batch["new_logprobs"].nan_to_num().requires_grad_(),))


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "gspo"])
def test_gradients_of_losses_with_a_constant_weight(name: str) -> None:
    """Token by token, in plain Python. The engine's policy is not the old policy here."""
    [sequence] = make_sequences(spread=0.8)[2:3]
    mask = sequence["mask"]
    new, old, behaviour, advantages = (
        sequence[key][mask].tolist() for key in ("new_logprobs", "old_logprobs", "behaviour_logprobs", "advantages")
    )
    s = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    expected = []
    for n, o, b, a in zip(new, old, behaviour, advantages, strict=True):
        if name == "cispo":
            weight = min(math.exp(n - o), 1.272)
        elif name == "dppo_tv":
            shift = math.exp(n) - math.exp(b)
            weight = 0.0 if (shift > 0.2 if a > 0 else shift < -0.2) else min(math.exp(n - o), 20.0)
        else:
            clipped = (a > 0 and s > 1 + 4e-4) or (a < 0 and s < 1 - 3e-4)
            weight = 0.0 if clipped else s / len(new)
        expected.append(-weight * a)
    _, gradient = summed_loss(sequence, name)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)
    assert name != "dppo_tv" or 0 < sum(weight == 0 for weight in expected) < len(expected)


def test_the_trust_region_of_dppo_is_about_the_engine() -> None:
    """From 0.1 to 0.5 the probability rose by more than 0.2: a good token has no gradient any more, a bad one still has."""
    for advantage, has_gradient in ((1.0, False), (-1.0, True)):
        row = {
            "new_logprobs": math.log(0.5),
            "old_logprobs": math.log(0.5),
            "behaviour_logprobs": math.log(0.1),
            "advantages": advantage,
        }
        batch = {name: torch.tensor([[value]]) for name, value in row.items()}
        _, gradient = summed_loss(
            batch | {"mask": torch.tensor([[True]]), "position_ids": torch.tensor([[1]])}, "dppo_tv"
        )
        assert bool(gradient.any()) == has_gradient


def objective_of(name: str, new: torch.Tensor, *, advantage: float, weights: torch.Tensor) -> torch.Tensor:
    """The summed loss of one response that was sampled with log-probs of -1."""
    old = torch.full_like(new, -1.0).detach()
    inputs = make_loss_inputs(
        new_logprobs=new,
        old_logprobs=old,
        behaviour_logprobs=old,
        ref_logprobs=None,
        advantages=torch.full_like(old, advantage),
        mask=torch.ones_like(old, dtype=torch.bool),
        position_ids=torch.arange(1, new.shape[1] + 1)[None],
    )
    entry = LOSSES[name]
    loss, _ = compute_objective(
        inputs, lambda inputs: entry.value(inputs, entry.options()), beta=0.0, kl_estimator=2, weights=weights
    )
    return loss


@pytest.mark.parametrize("name", LOSSES.names)
def test_a_token_that_a_correction_leaves_out_is_not_trained_on(name: str) -> None:
    """Nor does it change what the other tokens learn."""
    new = torch.full((1, 4), -1.0, requires_grad=True)
    weights = torch.tensor([[1.0, 0.5, 0.0, 1.0]])
    objective_of(name, new, advantage=1.0, weights=weights).backward()
    torch.testing.assert_close(new.grad, -weights)


@pytest.mark.parametrize("name", LOSSES.names)
def test_a_ratio_without_bounds_and_no_advantage_give_no_nan(name: str) -> None:
    new = torch.tensor([[119.0, -200.0, -1.0]], requires_grad=True)
    objective_of(name, new, advantage=0.0, weights=torch.ones(1, 3)).backward()
    assert new.grad is not None
    assert (new.grad == 0).all()
