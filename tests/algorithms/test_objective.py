"""The GRPO objective against its definition."""

import math

import numpy as np
import pytest
import torch
from batches import OPTIONS, SHAPE, compute_grpo_loss, make_batch

from open_instruct.algorithms.metric_merging import finish_ratio_variance


@pytest.mark.parametrize("kl_estimator", range(5))
def test_grpo_loss_equals_its_definition_token_by_token(kl_estimator: int) -> None:
    batch = make_batch()
    loss, sums = compute_grpo_loss(**batch, **(OPTIONS | {"kl_estimator": kl_estimator}))

    policy = clipfrac = ratios = spread = 0.0
    kls = np.zeros(5)
    for new, old, ref, advantage in zip(
        *(batch[k][batch["mask"]].tolist() for k in ("new_logprobs", "old_logprobs", "ref_logprobs", "advantages")),
        strict=True,
    ):
        ratio = math.exp(new - old)
        clamped = min(max(ratio, 0.8), 1.272)
        policy += max(-advantage * ratio, -advantage * clamped)
        clipfrac += -advantage * clamped > -advantage * ratio
        ratios += ratio
        spread += (ratio - 1) ** 2
        d = new - ref
        k3 = math.exp(-d) - 1 + d
        kls += [d, d * d / 2, k3, ratio * d, ratio * k3]
    expected = {
        "loss/policy_avg": policy,
        "loss/kl_avg": 0.05 * kls[kl_estimator],
        "loss/total_avg": policy + 0.05 * kls[kl_estimator],
        "policy/clipfrac_avg": clipfrac,
        "val/ratio": ratios,
        "val/ratio_spread": spread,
        **{f"objective/kl{i}_avg": kl for i, kl in enumerate(kls)},
    }
    assert 0 < clipfrac < int(batch["mask"].sum())
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(expected["loss/total_avg"])
    assert not any(value.requires_grad for value in sums.values())


def test_without_a_reference_there_is_no_kl() -> None:
    loss, sums = compute_grpo_loss(**make_batch(ref_logprobs=None), **OPTIONS)
    assert not [name for name in sums if name.startswith("objective/")]
    assert sums["loss/kl_avg"] == 0
    assert loss.item() == pytest.approx(sums["loss/policy_avg"].item(), rel=1e-6)


def test_the_gradient_is_that_of_finite_differences() -> None:
    batch = make_batch()
    new = batch.pop("new_logprobs")
    assert torch.autograd.gradcheck(lambda x: compute_grpo_loss(x, **batch, **OPTIONS)[0], (new,))


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    batch = make_batch(ref_logprobs=None)
    batch["old_logprobs"] = batch["new_logprobs"].detach()
    compute_grpo_loss(**batch, **OPTIONS)[0].backward()
    torch.testing.assert_close(batch["new_logprobs"].grad, -batch["advantages"] * batch["mask"])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("field", ["new_logprobs", "old_logprobs", "ref_logprobs", "advantages"])
def test_what_stands_outside_the_mask_does_not_matter(field: str, garbage: float) -> None:
    clean, dirty = make_batch(), make_batch()
    dirty[field] = torch.where(dirty["mask"], dirty[field].detach(), garbage)
    dirty["new_logprobs"] = dirty["new_logprobs"].detach().requires_grad_()
    results = []
    for batch in (clean, dirty):
        loss, sums = compute_grpo_loss(**batch, **OPTIONS)
        loss.backward()
        results.append((loss, sums, batch["new_logprobs"].grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_sums_of_micro_batches_add_up_to_the_sum_of_the_batch() -> None:
    batch = make_batch()
    loss, sums = compute_grpo_loss(**batch, **OPTIONS)
    rows = [compute_grpo_loss(**{k: v[i : i + 1] for k, v in batch.items()}, **OPTIONS) for i in range(SHAPE[0])]
    assert sum(r[0].item() for r in rows) == pytest.approx(loss.item())
    assert {k: sum(r[1][k].item() for r in rows) for k in sums} == pytest.approx(
        {k: v.item() for k, v in sums.items()}, rel=1e-5
    )


def test_a_micro_batch_without_trained_tokens_gives_zero_and_a_gradient_of_zero() -> None:
    batch = make_batch(mask=torch.zeros(SHAPE, dtype=torch.bool))
    loss, sums = compute_grpo_loss(**batch, **OPTIONS)
    loss.backward()
    assert loss == 0
    assert all(value == 0 for value in sums.values())
    assert (batch["new_logprobs"].grad == 0).all()


@pytest.mark.parametrize("deviation", [1.0, 1e-2, 1e-4])
def test_ratio_variance_is_that_of_all_tokens(deviation: float) -> None:
    """Over micro-batches of different size and mean, in float32, also where ratios lie very near 1."""
    generator = torch.Generator().manual_seed(2)
    parts = []
    for rows, shift in ((1, 0.0), (3, 0.5), (2, -0.5)):
        log_ratios = deviation * (torch.randn(rows, 500, generator=generator) + shift)
        mask = torch.rand(log_ratios.shape, generator=generator) < 0.7
        zeros = torch.zeros_like(log_ratios)
        _, sums = compute_grpo_loss(log_ratios, zeros, None, zeros, mask, **OPTIONS)
        parts.append((sums, log_ratios.exp()[mask]))
    ratios = torch.cat([ratios for _, ratios in parts]).double()
    names = parts[0][0]
    means = {name: sum(float(sums[name]) for sums, _ in parts) / len(ratios) for name in names}
    finished = finish_ratio_variance(means)
    assert set(finished) == {*names, "val/ratio_var"} - {"val/ratio_spread"}
    assert finished["val/ratio_var"] == pytest.approx(ratios.var(unbiased=False).item(), rel=1e-4)


def test_on_policy_the_ratio_does_not_vary() -> None:
    batch = make_batch()
    batch["old_logprobs"] = batch["new_logprobs"].detach()
    _, sums = compute_grpo_loss(**batch, **OPTIONS)
    count = int(batch["mask"].sum())
    assert finish_ratio_variance({name: float(value) / count for name, value in sums.items()})["val/ratio_var"] == 0


def test_without_a_trained_token_there_is_no_variance() -> None:
    _, sums = compute_grpo_loss(**make_batch(mask=torch.zeros(SHAPE, dtype=torch.bool)), **OPTIONS)
    assert finish_ratio_variance({name: float(value) for name, value in sums.items()})["val/ratio_var"] == 0


def test_a_weight_multiplies_both_parts_of_the_loss() -> None:
    torch.manual_seed(0)
    new, old, ref, advantage = (torch.randn(1, 6) for _ in range(4))
    mask = torch.ones(1, 6, dtype=torch.bool)

    def loss(tokens: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return compute_grpo_loss(new, old, ref, advantage, tokens, **OPTIONS, loss_weights=weights, kl_weights=weights)[
            0
        ]

    first = torch.tensor([[True] * 3 + [False] * 3])
    weights = torch.where(first, 2.0, 0.5)
    torch.testing.assert_close(loss(mask, weights), 2.0 * loss(first) + 0.5 * loss(~first))


def test_the_kl_has_weights_of_its_own() -> None:
    batch = make_batch()
    weights = torch.rand(SHAPE, dtype=torch.float64)
    plain, sums = compute_grpo_loss(**batch, **OPTIONS)
    weighed, own = compute_grpo_loss(**batch, **OPTIONS, kl_weights=weights)
    assert own["loss/policy_avg"] == sums["loss/policy_avg"]
    assert own["loss/kl_avg"] < sums["loss/kl_avg"]
    torch.testing.assert_close((weighed - plain).float().detach(), own["loss/kl_avg"] - sums["loss/kl_avg"])


def test_the_entropy_bonus_rewards_entropy_on_trained_tokens() -> None:
    batch = make_batch(ref_logprobs=None)
    entropy = torch.rand(batch["mask"].shape, dtype=torch.float64).requires_grad_()
    plain, _ = compute_grpo_loss(**batch, **OPTIONS)
    with_bonus, sums = compute_grpo_loss(**batch, **OPTIONS, entropy=entropy, entropy_coef=0.5)
    trained = entropy[batch["mask"]].sum()
    assert with_bonus.item() == pytest.approx((plain - 0.5 * trained).item())
    assert sums["loss/total_avg"].item() == pytest.approx(with_bonus.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(with_bonus, entropy)
    torch.testing.assert_close(gradient, torch.where(batch["mask"], -0.5, 0.0).double())
