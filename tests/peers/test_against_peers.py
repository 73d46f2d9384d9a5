"""Every loss, advantage, KL estimate and correction that TRL 1.16 or verl 0.9.1 has, against theirs, to 1e-6 in float32. Losses
together with the head of the model, against Liger's 0.8.5, which begin at the hidden states, to 1e-5.

Where a peer differs on purpose, the test says why. `ask_peers.py` runs their code, in the environment that
`scripts/setup_peers.sh` makes.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_cases import (
    BETA,
    CASES,
    CLIP_HIGHER,
    CLIP_LOWER,
    DUAL_CLIP,
    FURTHER_CASES,
    HEADS,
    MAX_LENGTH,
    OFF_POLICY_THRESHOLD,
    REWARDS,
    RHO_LOWER,
    RHO_UPPER,
    TEACHERS,
    TEMPERATURE,
    TOP_KS,
    VOCAB,
    Case,
    lengths_of,
    with_engine_as_old_policy,
)

from open_instruct.algorithms.advantages import ADVANTAGES, group_advantages
from open_instruct.algorithms.corrections import RhoOptions, compute_rho_correction, off_policy_sequence_mask
from open_instruct.algorithms.denominators import SEQUENCE, TOKEN, loss_divisor
from open_instruct.algorithms.distillation import TeacherInputs, forward_kl
from open_instruct.algorithms.kl import estimate_kl
from open_instruct.algorithms.losses import LOSSES, LossInputs
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs, weights_of_sequences
from open_instruct.learners.logprobs import chunked_log_probs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXACT: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
DIFFERENT_CLIPS = {"clip_lower": CLIP_LOWER, "clip_higher": CLIP_HIGHER}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, np.ndarray]:
    """The peers' answers by name (see `ask_peers.py`)."""
    answers = tmp_path_factory.mktemp("peers") / "answers.npz"
    subprocess.run(["bash", ROOT / "scripts/setup_peers.sh"], check=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asking = [ROOT / ".venv-peers/bin/python", HERE / "ask_peers.py", answers]
    subprocess.run(asking, check=True, timeout=300, env=environment)
    return np.load(answers)


def loss_inputs(case: Case) -> tuple[torch.Tensor, LossInputs]:
    """The new log-probs, with a gradient, and what a loss sees. Outside the mask stands nonsense, which must not matter."""
    mask = torch.from_numpy(case.mask)
    values = {
        name: torch.where(mask, torch.from_numpy(array), torch.nan)
        for name, array in vars(case).items()
        if name not in ("mask", "advantages")
    }
    new = values["new"].requires_grad_()
    inputs = make_loss_inputs(
        new_logprobs=new,
        old_logprobs=values["old"],
        behaviour_logprobs=values["behaviour"],
        ref_logprobs=values["ref"],
        advantages=torch.from_numpy(case.advantages).expand(mask.shape),
        mask=mask,
        position_ids=torch.arange(1, mask.shape[1] + 1).expand(mask.shape),
    )
    return new, inputs


def objective(
    case: Case,
    loss: str,
    *,
    beta: float = 0.0,
    kl_estimator: int = 2,
    off_policy_threshold: float | None = None,
    **own: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of a case, divided as the loss is meant to be, and its gradient by the new log-probs."""
    new, inputs = loss_inputs(case)
    total = objective_of(
        inputs, case, loss, beta=beta, kl_estimator=kl_estimator, off_policy_threshold=off_policy_threshold, **own
    )
    total.backward()
    assert new.grad is not None
    return total.detach(), new.grad


def objective_of(
    inputs: LossInputs,
    case: Case,
    loss: str,
    *,
    beta: float = 0.0,
    kl_estimator: int = 2,
    off_policy_threshold: float | None = None,
    **own: Any,
) -> torch.Tensor:
    entry = LOSSES[loss]
    denominator = entry.facts.get("denominator", TOKEN)
    weights = None
    if off_policy_threshold is not None:
        weights = off_policy_sequence_mask(
            inputs.new_logprobs,
            inputs.behaviour_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.position_ids,
            off_policy_threshold,
        ).float()
    total, _ = compute_objective(
        inputs,
        lambda inputs: entry.value(inputs, entry.options(**own)),
        beta=beta,
        kl_estimator=kl_estimator,
        weights=weights,
        loss_weights=weights_of_sequences(inputs.mask, inputs.sequence_ids) if denominator == SEQUENCE else None,
    )
    return total / loss_divisor(
        denominator,
        num_tokens=int(case.mask.sum()),
        num_sequences=int(case.mask.any(1).sum()),
        response_length=MAX_LENGTH,
    )


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("dapo", DIFFERENT_CLIPS),
    "dual_clip": ("dapo", {**DIFFERENT_CLIPS, "clip_ratio_c": DUAL_CLIP}),
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "cispo": ("cispo", DIFFERENT_CLIPS),
    "gspo": ("gspo", {}),
    "gmpo": ("gmpo", {}),
    "sapo": ("sapo", {}),
    "dppo_tv": ("dppo_tv", {}),
    "k3": ("dapo", {**DIFFERENT_CLIPS, "beta": BETA, "kl_estimator": 2}),
    "unbiased_kl": ("dapo", {**DIFFERENT_CLIPS, "beta": BETA, "kl_estimator": 4}),
    "off_policy_mask": ("dapo", {**DIFFERENT_CLIPS, "off_policy_threshold": OFF_POLICY_THRESHOLD}),
}


def comparisons() -> Iterator[Any]:
    of_trl = sorted(OURS.keys() - {"gmpo", "dppo_tv"})
    of_verl = sorted(OURS.keys() - {"k3", "unbiased_kl", "off_policy_mask"})
    for peer, quantities, cases in (("trl", of_trl, {**CASES, **FURTHER_CASES}), ("verl", of_verl, CASES)):
        for quantity in quantities:
            for name, case in cases.items():
                yield pytest.param(peer, quantity, name, case, id=f"{peer}-{quantity}-{name}")


@pytest.mark.parametrize(("peer", "quantity", "name", "case"), comparisons())
def test_loss_and_gradient(peers: Mapping[str, np.ndarray], peer: str, quantity: str, name: str, case: Case) -> None:
    loss, own = OURS[quantity]
    case = with_engine_as_old_policy(case) if quantity == "dppo_tv" else case
    value, gradient = objective(case, loss, **own)
    expected = torch.from_numpy(peers[f"{peer}/{quantity}/{name}"]) * rescale(peer, quantity, case)
    scale = max(1.0, float(expected.abs()))  # float32 has no more digits
    # The mean of a response with log-ratios of 40 has the error of one of them in float32, 4e-6, and so has its exponential.
    exact = 4e-6 if quantity == "gspo" and name in FURTHER_CASES else 1e-6
    torch.testing.assert_close(value / scale, expected / scale, rtol=exact, atol=exact)
    expected = torch.from_numpy(peers[f"{peer}/{quantity}/{name}/gradient"]) * rescale(peer, quantity, case)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(gradient / scale, expected / scale, rtol=exact, atol=exact)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("quantity", sorted(OURS.keys() - {"gmpo", "dppo_tv", "off_policy_mask"}))
def test_loss_and_gradient_with_the_head(peers: Mapping[str, np.ndarray], quantity: str, name: str) -> None:
    """In chunks of three tokens, as Liger computes sequence by sequence."""
    head, (loss, own) = HEADS[name], OURS[quantity]
    hidden, weight = (torch.from_numpy(array.copy()).requires_grad_() for array in (head.hidden, head.weight))
    mask = torch.from_numpy(head.case.mask)
    logprobs, _ = chunked_log_probs(
        hidden[mask], weight, torch.from_numpy(head.tokens)[mask], temperature=TEMPERATURE, chunk_elements=3 * VOCAB
    )
    _, inputs = loss_inputs(head.case)
    new = torch.zeros(mask.shape).masked_scatter(mask, logprobs)
    total = objective_of(replace(inputs, new_logprobs=new), head.case, loss, **own)
    total.backward()
    answer = f"liger/{quantity}/{name}"
    for ours, theirs in ((total, answer), (hidden.grad, f"{answer}/hidden"), (weight.grad, f"{answer}/weight")):
        torch.testing.assert_close(ours, torch.from_numpy(peers[theirs]), rtol=1e-5, atol=1e-6)


def rescale(peer: str, quantity: str, case: Case) -> float:
    """TRL (and verl's gmpo) divides by all sequences, also by those of which no token is trained on. Here such a sequence does
    not count, because whether it was filtered before it came to the learner would else change the step."""
    if (peer == "trl" and quantity in ("grpo", "dr_grpo", "sapo", "gspo")) or quantity == "gmpo":
        return len(case.mask) / float(case.mask.any(1).sum())
    return 1.0


@pytest.mark.parametrize("name", CASES)
def test_kl_estimates(peers: Mapping[str, np.ndarray], name: str) -> None:
    case = CASES[name]
    new, inputs = loss_inputs(case)
    del new
    assert inputs.ref_logprobs is not None
    estimates = estimate_kl(inputs.new_logprobs - inputs.ref_logprobs, inputs.ratio).detach()
    for number, kind in enumerate(("k1", "k2", "k3")):
        expected = torch.from_numpy(peers[f"verl/{kind}/{name}"])
        # verl cuts k3 at 10 on purpose, for stability; here and in TRL one token counts in full.
        ours = estimates[number].clamp(max=10) if kind == "k3" else estimates[number]
        torch.testing.assert_close(ours, expected, **EXACT)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_importance_weights(peers: Mapping[str, np.ndarray], name: str, level: Any, kind: str) -> None:
    _, inputs = loss_inputs(CASES[name])
    options = RhoOptions(clamp_upper=0.0, level=level, mask_lower=RHO_LOWER, mask_upper=RHO_UPPER)
    if kind == "truncated":
        options = RhoOptions(clamp_upper=RHO_UPPER, level=level)
    weights, _ = compute_rho_correction(
        inputs.old_logprobs, inputs.behaviour_logprobs, inputs.mask, inputs.position_ids, options
    )
    torch.testing.assert_close(weights, torch.from_numpy(peers[f"verl/{kind}_{level}/{name}"]), **EXACT)


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    "kind", ["centered", "standard", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_advantages(peers: Mapping[str, np.ndarray], name: str, kind: str) -> None:
    groups, lengths = REWARDS[name], lengths_of(REWARDS[name])
    advantages = [
        group_advantages(np.array(group), kind, lengths_G=own) for group, own in zip(groups, lengths, strict=True)
    ]
    expected = np.split(
        peers[f"verl/{'grpo' if kind == 'standard' else kind}/{name}"], np.cumsum([*map(len, groups)])[:-1]
    )
    over_step = ADVANTAGES[kind].facts.get("over_step")
    if over_step is not None:
        whole = over_step(np.concatenate(advantages).astype(np.float64), np.concatenate(lengths))
        advantages = np.split(whole.astype(np.float32), np.cumsum([*map(len, groups)])[:-1])
    for ours, theirs, group in zip(advantages, expected, groups, strict=True):
        if len(group) == 1 and kind != "reinforce_plus_plus":
            # verl takes the reward itself; without a second response there is nothing to compare with, so it is 0 here.
            if over_step is None:
                assert ours == 0
            continue
        if kind == "standard":
            # verl divides by the standard deviation of a sample plus 1e-6, open-instruct and this project by that of the
            # population plus 1e-8.
            size = len(group)
            theirs = theirs * (np.std(group, ddof=1) + 1e-6) / (np.std(group) + 1e-8)
            assert size > 1
        if over_step is not None and name == "a group of one" and kind != "reinforce_plus_plus":
            continue  # that one reward moves the mean of the step
        np.testing.assert_allclose(ours, theirs, **EXACT)


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("top_k", TOP_KS)
def test_distillation(peers: Mapping[str, np.ndarray], name: str, top_k: int) -> None:
    """verl has forward_kl alone over the teacher's tokens; reverse_kl is compared with the whole KL (tests/algorithms)."""
    policy, teacher = (torch.from_numpy(logits.copy()) for logits in TEACHERS[name])
    logprobs = policy.requires_grad_().log_softmax(-1)
    top = teacher.log_softmax(-1).topk(top_k)
    sampled = torch.zeros(1, len(policy))
    inputs = TeacherInputs(
        new_top_logprobs=logprobs.gather(1, top.indices)[None],
        teacher_top_logprobs=top.values[None],
        new_logprobs=sampled,
        teacher_logprobs=sampled,
        is_in_top=sampled.bool(),
        tail_weights=sampled,
        mask=torch.ones_like(sampled, dtype=torch.bool),
    )
    loss, _ = forward_kl(inputs, None)
    loss.sum().backward()
    expected = torch.from_numpy(peers[f"verl/forward_kl/{name}/{top_k}"])
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(loss[0].detach() / scale, expected / scale, **EXACT)
    torch.testing.assert_close(
        policy.grad, torch.from_numpy(peers[f"verl/forward_kl/{name}/{top_k}/gradient"]), **EXACT
    )
