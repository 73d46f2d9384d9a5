"""Weights of tokens that another policy sampled, against their definition, response by response."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from batches import OPTIONS, SHAPE, compute_grpo_loss, make_batch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from open_instruct.algorithms.corrections import RhoOptions, compute_rho_correction, off_policy_sequence_mask
from open_instruct.data_types import TrainingSample
from open_instruct.rollouts.collation import collate_packed, collate_padded

NO_BOUNDS = RhoOptions(clamp_upper=0.0)


def make_behaviour(seed: int = 1) -> dict[str, torch.Tensor]:
    """Engine and old policy that differ, and masked tokens that hold nonsense."""
    batch, generator = make_batch(), torch.Generator().manual_seed(seed)
    noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    mask = batch["mask"]
    return {
        "old_logprobs": batch["old_logprobs"],
        "vllm_logprobs": torch.where(mask, batch["old_logprobs"] - noise, torch.nan),
        "mask": mask,
        "position_ids": torch.arange(SHAPE[1]).expand(SHAPE),
    }


def test_weighted_loss_is_the_importance_weighted_objective() -> None:
    """Where nothing is clipped or truncated, old cancels: sum over tokens of pi_new/pi_engine * A, in double precision."""
    batch, behaviour = make_batch(ref_logprobs=None), make_behaviour()
    weights, _ = compute_rho_correction(**behaviour, options=NO_BOUNDS)
    options = OPTIONS | {"clip_lower": 1.0, "clip_higher": 1e9}
    loss, _ = compute_grpo_loss(**batch, **options, weights=weights)
    loss.backward()
    new = batch["new_logprobs"].detach().clone().requires_grad_()
    mask = behaviour["mask"]
    ratios = (new[mask] - behaviour["vllm_logprobs"][mask]).exp()
    expected = -(ratios * batch["advantages"][mask]).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(batch["new_logprobs"].grad, new.grad, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        RhoOptions(),
        RhoOptions(mask_lower=0.5, mask_upper=2.0),
        RhoOptions(mask_lower=0.5, mask_upper=2.0, sequence_level=True),
        RhoOptions(mask_upper=0.2, tv_divergence=True),
    ],
)
def test_on_policy_loss_and_gradient_stay_as_they_were_to_the_bit(dtype: torch.dtype, options: RhoOptions) -> None:
    results = []
    for weighed in (False, True):
        batch = {k: v if k == "mask" else v.detach().to(dtype) for k, v in make_batch().items()}
        new, old, mask = batch["new_logprobs"].requires_grad_(), batch["old_logprobs"], batch["mask"]
        positions = torch.arange(SHAPE[1]).expand(SHAPE)
        weights, sums = compute_rho_correction(old, old.clone(), mask, positions, options)
        assert torch.equal(weights, mask.to(dtype))
        assert sums["val/rho_clipfrac"] == sums["val/rho_drop_frac"] == 0
        assert sums["val/rho_weight"] == mask.sum()
        loss, _ = compute_grpo_loss(**batch, **OPTIONS, weights=weights if weighed else None)
        loss.backward()
        results.append((loss.detach(), new.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_kl_is_not_weighed() -> None:
    zero = torch.zeros(SHAPE, dtype=torch.float64)
    loss, sums = compute_grpo_loss(**make_batch(), **OPTIONS, weights=zero)
    _, plain = compute_grpo_loss(**make_batch(), **OPTIONS)
    assert sums["loss/policy_avg"] == 0
    assert loss.item() == pytest.approx(plain["loss/kl_avg"].item(), rel=1e-6)
    assert loss != 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_weights_are_constants_that_count_within_the_mask(garbage: float) -> None:
    gradients = []
    for outside in (0.0, garbage):
        batch = make_batch()
        factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        weights = torch.where(batch["mask"], factor * batch["new_logprobs"].exp(), outside)
        compute_grpo_loss(**batch, **OPTIONS, weights=weights)[0].backward()
        assert factor.grad is None
        gradients.append(batch["new_logprobs"].grad)
    constant, batch = 0.5 * make_batch()["new_logprobs"].detach().exp(), make_batch()
    compute_grpo_loss(**batch, **OPTIONS, weights=constant)[0].backward()
    assert torch.equal(gradients[0], batch["new_logprobs"].grad)
    assert torch.equal(gradients[1], batch["new_logprobs"].grad)


def rho_of(*values: float) -> dict[str, torch.Tensor]:
    """One sequence whose tokens have these rho."""
    logs = torch.tensor([values], dtype=torch.float64).log()
    row = torch.arange(len(values))[None]
    return {
        "old_logprobs": logs,
        "vllm_logprobs": torch.zeros_like(logs),
        "mask": torch.ones_like(logs, dtype=torch.bool),
        "position_ids": row,
    }


def test_truncation_and_masking() -> None:
    tokens = rho_of(0.1, 0.5, 1.0, 1.9, 3.0)
    weights, sums = compute_rho_correction(**tokens, options=RhoOptions(clamp_lower=0.2, clamp_upper=2.0))
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.5, 1.0, 1.9, 2.0]], dtype=torch.float64))
    assert sums["val/rho_clipfrac"] == 2
    assert sums["val/rho_drop_frac"] == 0
    options = RhoOptions(mask_lower=0.4, mask_upper=1.5)
    weights, sums = compute_rho_correction(**tokens, options=options)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.5, 1.0, 0.0, 0.0]], dtype=torch.float64))
    assert [sums[f"val/rho_drop_{side}frac"].item() for side in ("", "low_", "high_")] == [3, 1, 2]


@pytest.mark.parametrize("rho", [0.5, 2.0])
def test_a_rho_at_a_bound_is_within_it(rho: float) -> None:
    options = RhoOptions(clamp_lower=0.5, clamp_upper=2.0, mask_lower=0.5, mask_upper=2.0)
    old = torch.tensor([[math.log(rho)]], dtype=torch.float64)
    weights, sums = compute_rho_correction(
        old, torch.zeros_like(old), torch.tensor([[True]]), torch.tensor([[1]]), options
    )
    assert weights.item() == pytest.approx(rho)
    assert sums["val/rho_clipfrac"] == sums["val/rho_drop_frac"] == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("field", ["old_logprobs", "vllm_logprobs"])
@pytest.mark.parametrize("sequence_level", [False, True])
def test_what_stands_outside_the_mask_weighs_nothing(field: str, garbage: float, sequence_level: bool) -> None:
    options = RhoOptions(mask_lower=0.5, mask_upper=1.5, sequence_level=sequence_level)
    results = []
    for value in (0.0, garbage):
        batch, behaviour = make_batch(), make_behaviour()
        behaviour["vllm_logprobs"] = torch.where(behaviour["mask"], behaviour["vllm_logprobs"], 0)
        behaviour[field] = torch.where(behaviour["mask"], behaviour[field], value)
        weights, sums = compute_rho_correction(**behaviour, options=options)
        loss, _ = compute_grpo_loss(**batch, **OPTIONS, weights=weights)
        loss.backward()
        gradient = batch["new_logprobs"].grad
        assert gradient.isfinite().all()
        results.append((weights, sums, loss.detach(), gradient))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_far_log_probs_stay_finite() -> None:
    weights, _ = compute_rho_correction(**rho_of(1e-300, 1e300), options=NO_BOUNDS)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(-10), math.exp(10)]], dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        RhoOptions(clamp_upper=0.0, mask_lower=0.7, mask_upper=1.4, sequence_level=True),
        RhoOptions(clamp_upper=0.0, mask_upper=0.3, tv_divergence=True),
    ],
)
def test_sequences_are_judged_apart_in_a_packed_row(options: RhoOptions) -> None:
    near, far = rho_of(0.9, 1.3, 1.0), rho_of(2.5, 2.0)
    alone = [compute_rho_correction(**sequence, options=options) for sequence in (near, far)]
    assert alone[0][0].all()
    assert not alone[1][0].any()
    packed = {name: torch.cat([near[name], far[name]], dim=1) for name in near}
    weights, sums = compute_rho_correction(**packed, options=options)
    assert torch.equal(weights, torch.cat([alone[0][0], alone[1][0]], dim=1))
    for name, value in sums.items():
        assert value == alone[0][1][name] + alone[1][1][name], name


@dataclass(frozen=True)
class Token:
    """A response token with its three log-probs."""

    new: float
    old: float
    vllm: float
    is_trained: bool


near_log_probs = st.floats(-4, 0, width=32)
tokens_of_a_response = st.lists(
    st.builds(Token, near_log_probs, near_log_probs, near_log_probs, st.booleans()), min_size=1, max_size=6
)
responses_to_learn_from = st.lists(
    st.tuples(st.integers(1, 3), tokens_of_a_response, st.floats(-2, 2, width=32)), min_size=1, max_size=5
)
rho_options = st.builds(
    RhoOptions,
    clamp_lower=st.sampled_from([0.0, 0.5]),
    clamp_upper=st.sampled_from([0.0, 1.5, 3.0]),
    mask_lower=st.sampled_from([0.0, 0.25, 0.7]),
    mask_upper=st.sampled_from([0.0, 1.1, 2.5]),
    sequence_level=st.booleans(),
) | st.builds(RhoOptions, mask_upper=st.sampled_from([0.0, 0.1, 0.5]), tv_divergence=st.just(True))


def judged_by_hand(rhos: Sequence[float], options: RhoOptions) -> tuple[list[float], float]:
    """What stands for each trained token of a response when outliers are sought, and its lower bound."""
    if options.sequence_level:
        return [math.prod(rhos) ** (1 / len(rhos))] * len(rhos), options.mask_lower
    if options.tv_divergence:
        return [sum(abs(rho - 1) for rho in rhos) / 2 / len(rhos)] * len(rhos), 0.0
    return list(rhos), options.mask_lower


def weights_by_hand(rhos: Sequence[float], options: RhoOptions) -> list[float]:
    """Of the trained tokens of one response."""
    if not rhos:
        return []
    judged, lower = judged_by_hand(rhos, options)
    bounds = [bound for bound in (lower, options.mask_upper) if bound]
    assume(all(abs(value - bound) > 1e-6 for value in judged for bound in bounds))
    weights = []
    for rho, value in zip(rhos, judged, strict=True):
        is_outlier = value < lower or (options.mask_upper > 0 and value > options.mask_upper)
        capped = min(rho, options.clamp_upper) if options.clamp_upper > 0 else rho
        weights.append(0.0 if is_outlier else max(capped, options.clamp_lower))
    return weights


def as_samples(responses: Sequence[tuple[int, list[Token], float]]) -> tuple[list[TrainingSample], dict[int, Token]]:
    """Samples in which every token has an id of its own, and the trained response tokens by that id."""
    next_id, samples, trained = 0, [], {}
    for query_length, tokens, advantage in responses:
        ids = np.arange(next_id, next_id + query_length + len(tokens), dtype=np.int32)
        next_id += len(ids)
        mask = np.array([token.is_trained for token in tokens])
        logprobs = np.array([token.vllm for token in tokens], dtype=np.float32)
        samples.append(TrainingSample(ids[:query_length], ids[query_length:], mask, logprobs, advantage))
        trained |= {int(i): token for i, token in zip(ids[query_length:], tokens, strict=True) if token.is_trained}
    return samples, trained


def decoupled_loss_by_hand(
    samples: Sequence[TrainingSample], trained: dict[int, Token], new: torch.Tensor, options: RhoOptions
) -> tuple[torch.Tensor, dict[int, float]]:
    """sum of w(old / engine) * max(-A r, -A clip(r)) with r = new / old, in scalars; and w. `new` is by token id."""
    loss, weights = torch.zeros((), dtype=torch.float64), {}
    for sample in samples:
        ids = [int(i) for i in sample.response[sample.mask]]
        rhos = [math.exp(trained[i].old - trained[i].vllm) for i in ids]
        for i, weight in zip(ids, weights_by_hand(rhos, options), strict=True):
            ratio = (new[i] - trained[i].old).exp()
            clipped = -sample.advantage * ratio.clamp(0.8, 1.272)
            loss = loss + weight * torch.maximum(-sample.advantage * ratio, clipped)
            weights[i] = weight
    return loss, weights


@settings(deadline=None)
@given(
    responses=responses_to_learn_from, options=rho_options, collate=st.sampled_from([collate_padded, collate_packed])
)
def test_decoupled_loss_and_gradient_are_those_of_each_response_by_itself(responses, options, collate) -> None:
    """Rows as the learners get them, padded or packed, against response by response."""
    samples, trained = as_samples(responses)
    assume(trained)
    num_ids = sum(len(sample) for sample in samples) + 1
    old = torch.zeros(num_ids, dtype=torch.float64)
    new = torch.zeros(num_ids, dtype=torch.float64)
    for i, token in trained.items():
        new[i], old[i] = token.new, token.old
    by_hand, by_row = (new.clone().requires_grad_() for _ in range(2))
    expected_loss, expected_weights = decoupled_loss_by_hand(samples, trained, by_hand, options)

    batch = collate(samples, pad_token_id=num_ids - 1)
    rows = {name: torch.from_numpy(array[:, 1:]) for name, array in vars(batch).items() if array is not None}
    ids, mask = rows["query_responses"].long(), rows["response_masks"]
    weights, sums = compute_rho_correction(
        old[ids], rows["vllm_logprobs"].double(), mask, rows["position_ids"], options
    )
    loss, _ = compute_grpo_loss(
        by_row[ids], old[ids], None, rows["advantages"].double(), mask, **OPTIONS, weights=weights
    )

    got_weights = dict(zip(ids[mask].tolist(), weights[mask].tolist(), strict=True))
    assert got_weights == pytest.approx(expected_weights, rel=1e-9)
    assert sums["val/rho_weight"].item() == pytest.approx(sum(expected_weights.values()), rel=1e-5)
    num_dropped = sum(weight == 0 for weight in expected_weights.values())
    assert sums["val/rho_drop_frac"] == sums["val/rho_drop_low_frac"] + sums["val/rho_drop_high_frac"] == num_dropped
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-9, abs=1e-12)
    loss.backward()
    expected_loss.backward()
    torch.testing.assert_close(by_row.grad, by_hand.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        (RhoOptions(mask_upper=1.1), [True, False]),
        (
            RhoOptions(mask_lower=0.9, mask_upper=1.1, sequence_level=True),
            [True, True],
        ),  # 0.5 * 2 = 1, their mean is 1.25
        (RhoOptions(mask_upper=0.4, tv_divergence=True), [True, True]),  # (0.5 + 1) / 2 / 2 = 0.375
        (RhoOptions(mask_upper=0.35, tv_divergence=True), [False, False]),
        (RhoOptions(mask_lower=0.9, tv_divergence=True), [True, True]),  # a divergence is never too small
    ],
)
def test_a_sequence_is_judged_by_its_geometric_mean_or_its_divergence(options: RhoOptions, is_kept: list[bool]) -> None:
    weights, _ = compute_rho_correction(**rho_of(0.5, 2.0), options=options)
    assert (weights > 0).tolist() == [is_kept]


def test_sequences_of_a_single_token_are_apart_too() -> None:
    tokens = rho_of(1.0, 3.0)
    tokens["position_ids"] = torch.zeros(1, 2, dtype=torch.long)
    weights, _ = compute_rho_correction(**tokens, options=RhoOptions(mask_upper=1.5, sequence_level=True))
    assert weights.tolist() == [[1.0, 0.0]]


def test_a_row_of_one_token_has_nothing_to_weigh() -> None:
    empty = {name: tensor[:, :0] for name, tensor in rho_of(1.0).items()}
    weights, sums = compute_rho_correction(**empty, options=RhoOptions(sequence_level=True, mask_upper=1.5))
    assert weights.shape == (1, 0)
    assert all(value == 0 for value in sums.values())


def test_untrained_tokens_do_not_count_in_a_sequence() -> None:
    tokens = rho_of(1.0, 50.0, 1.0)
    tokens["mask"][0, 1] = False
    tokens["vllm_logprobs"][0, 1] = torch.nan
    options = RhoOptions(mask_upper=1.5, sequence_level=True)
    weights, _ = compute_rho_correction(**tokens, options=options)
    assert weights.tolist() == [[1.0, 0.0, 1.0]]


# --- one rho for a whole response, and the definitions of open-instruct -------------------------------------------------


def make_rows() -> tuple[dict[str, torch.Tensor], list[list[tuple[float, float, float]]]]:
    """A packed row of three sequences, whose first token is not trained on, and per sequence the (old, engine, advantage) of its
    trained tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [4, 7, 2]
    old, engine = (-torch.rand(1, sum(lengths), generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    advantages = torch.cat(
        [torch.full((length,), sign) for length, sign in zip(lengths, (1.0, -1.0, 1.0), strict=True)]
    )
    mask = positions > 0
    inputs = {"old_logprobs": old, "vllm_logprobs": engine, "mask": mask, "position_ids": positions}
    sequences, start = [], 0
    for length in lengths:
        tokens = range(start + 1, start + length)
        sequences.append([(float(old[0, t]), float(engine[0, t]), float(advantages[t])) for t in tokens])
        start += length
    return inputs | {"advantages": advantages[None].double()}, sequences


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_rho_of_a_response_is_that_of_each_sequence_in_a_packed_row(level: Any) -> None:
    inputs, sequences = make_rows()
    options = RhoOptions(level=level, clamp_upper=1.5, mask_lower=0.3)
    weights, sums = compute_rho_correction(**inputs, options=options)
    expected = []
    for tokens in sequences:
        log_rho = sum(old - engine for old, engine, _ in tokens) / (1 if level == "sequence" else len(tokens))
        rho = math.exp(log_rho)
        expected += [0.0, *([0.0 if rho < 0.3 else min(rho, 1.5)] * len(tokens))]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) > 2
    assert sums["val/rho_weight"].item() == pytest.approx(sum(expected), rel=1e-6)


def test_the_sequence_mask_of_open_instruct_is_about_the_row_and_weighs_by_its_mean() -> None:
    inputs, sequences = make_rows()
    options = RhoOptions(mask_upper=5.0, sequence_level=True, as_in_open_instruct=True)
    weights, _ = compute_rho_correction(**inputs, options=options)
    row = [old - engine for tokens in sequences for old, engine, _ in tokens]
    mean = math.exp(sum(row) / len(row))
    assert weights[inputs["mask"]].tolist() == pytest.approx([mean] * len(row), rel=1e-9)


@pytest.mark.parametrize("upper", [0.1, 10.0])
def test_the_tv_mask_of_open_instruct_masks_the_tokens_that_widen_the_gap(upper: float) -> None:
    inputs, sequences = make_rows()
    options = RhoOptions(mask_upper=upper, clamp_upper=0.0, tv_divergence=True, as_in_open_instruct=True)
    weights, _ = compute_rho_correction(**inputs, options=options)
    row = [token for tokens in sequences for token in tokens]
    deviation = sum(abs(math.exp(old - engine) - 1) for old, engine, _ in row) / len(row)
    expected = [
        0.0 if deviation > upper and (old - engine) * advantage > 0 else math.exp(old - engine)
        for old, engine, advantage in row
    ]
    assert weights[inputs["mask"]].tolist() == pytest.approx(expected, rel=1e-9)
    assert (0.0 in expected) == (upper == 0.1)


def test_off_policy_sequences_with_a_negative_advantage_are_masked() -> None:
    inputs, sequences = make_rows()
    means = [sum(engine - old for old, engine, _ in tokens) / len(tokens) for tokens in sequences]
    for threshold in (means[1] - 0.01, means[1] + 0.01):
        keep = off_policy_sequence_mask(
            inputs["old_logprobs"],
            inputs["vllm_logprobs"],
            inputs["advantages"],
            inputs["mask"],
            inputs["position_ids"],
            threshold,
        )
        expected = [mean <= threshold or tokens[0][2] >= 0 for mean, tokens in zip(means, sequences, strict=True)]
        keeps = [bool(row.all()) for row in keep[0].split([4, 7, 2])]
        assert keeps == expected
        assert keeps[1] == (threshold > means[1])
