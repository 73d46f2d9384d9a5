"""The distillation losses against the whole KL over a small vocabulary, in float64: their gradients are that of the KL."""

import math

import pytest
import torch

from open_instruct.algorithms.distillation import (
    DISTILLATION_LOSSES,
    MAX_TAIL_WEIGHT,
    TeacherInputs,
    forward_kl,
    importance_weights,
    reverse_kl,
)

VOCAB = 6
NO_OPTIONS = None


def distributions(seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy, with a gradient, and log-probs of the teacher: (V,) float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = spread * torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), teacher.log_softmax(-1)


def inputs_of(
    logits: torch.Tensor, teacher: torch.Tensor, top_k: int, sampled: int, *, weight: float = 1.0
) -> TeacherInputs:
    """One token, for which `sampled` was drawn."""
    logprobs = logits.log_softmax(-1)
    top = teacher.topk(top_k).indices
    return TeacherInputs(
        new_top_logprobs=logprobs[top][None, None],
        teacher_top_logprobs=teacher[top][None, None],
        new_logprobs=logprobs[sampled][None, None],
        teacher_logprobs=teacher[sampled][None, None],
        is_in_top=(top == sampled).any()[None, None],
        tail_weights=torch.full((1, 1), weight, dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )


def reverse(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - teacher)).sum()


def gradient_of(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


@pytest.mark.parametrize("top_k", range(VOCAB + 1))
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_gradient_of_reverse_kl_is_that_of_the_whole_kl_on_average(top_k: int, *, off_policy: bool) -> None:
    logits, teacher = distributions()
    drawn_by = distributions(seed=1)[0].softmax(-1).detach() if off_policy else logits.softmax(-1).detach()
    gradient, kl = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for sampled in range(VOCAB):
        weight = float(logits.detach().softmax(-1)[sampled] / drawn_by[sampled])
        assert weight < MAX_TAIL_WEIGHT
        loss, estimate = reverse_kl(inputs_of(logits, teacher, top_k, sampled, weight=weight), NO_OPTIONS)
        gradient += drawn_by[sampled] * gradient_of(loss.sum(), logits)
        kl += float(drawn_by[sampled] * estimate)
        assert float(loss.detach()) == pytest.approx(float(estimate))
    torch.testing.assert_close(gradient, gradient_of(reverse(logits, teacher), logits), rtol=1e-10, atol=1e-12)
    assert kl == pytest.approx(float(reverse(logits, teacher).detach()))


def test_with_the_whole_vocabulary_nothing_is_sampled() -> None:
    logits, teacher = distributions(seed=2)
    for sampled in range(VOCAB):
        loss, _ = reverse_kl(inputs_of(logits, teacher, VOCAB, sampled, weight=7.0), NO_OPTIONS)
        exact = gradient_of(reverse(logits, teacher), logits)
        torch.testing.assert_close(gradient_of(loss.sum(), logits), exact, rtol=1e-10, atol=1e-12)


def test_without_stop_gradient_the_sum_over_k_tokens_would_be_biased() -> None:
    logits, teacher = distributions()
    logprobs, top = logits.log_softmax(-1), teacher.topk(2).indices
    naive = gradient_of((logprobs[top].exp() * (logprobs[top] - teacher[top])).sum(), logits)
    inputs = inputs_of(logits, teacher, 2, int(top[0]))
    with_stop = gradient_of(reverse_kl(inputs, NO_OPTIONS)[0].sum(), logits)
    mass = logits.log_softmax(-1)[top].exp().sum()
    torch.testing.assert_close(naive - with_stop, gradient_of(mass, logits))  # it pushes mass out of the K tokens
    assert (naive - with_stop).abs().max() > 0.05


@pytest.mark.parametrize("top_k", [1, 3, VOCAB])
def test_forward_kl_is_a_plain_sum(top_k: int) -> None:
    logits, teacher = distributions(seed=3)
    loss, kl = forward_kl(inputs_of(logits, teacher, top_k, 0), NO_OPTIONS)
    logprobs, top = logits.log_softmax(-1), teacher.topk(top_k).indices.tolist()
    plain = sum(teacher[k].exp() * (teacher[k] - logprobs[k]) for k in top)
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(loss.squeeze(), plain)
    torch.testing.assert_close(gradient_of(loss.sum(), logits), gradient_of(plain, logits))
    assert not kl.requires_grad


@pytest.mark.parametrize("name", DISTILLATION_LOSSES.names)
def test_a_teacher_equal_to_the_policy_teaches_nothing(name: str) -> None:
    logits, _ = distributions()
    teacher = logits.detach().log_softmax(-1)
    for sampled in range(VOCAB):
        loss, kl = DISTILLATION_LOSSES[name].value(inputs_of(logits, teacher, VOCAB, sampled), NO_OPTIONS)
        assert float(kl) == pytest.approx(0, abs=1e-12)
        assert gradient_of(loss.sum(), logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", DISTILLATION_LOSSES.names)
def test_nonsense_outside_the_mask_and_tokens_that_were_not_named_do_not_matter(name: str) -> None:
    logits, teacher = distributions()
    inputs = inputs_of(logits, teacher, 2, 0)
    nan, inf = torch.full((1, 1, 2), torch.nan, dtype=torch.float64), torch.full((1, 1, 1), -torch.inf)
    wide = TeacherInputs(  # two tokens: the second one masked; and a third entry in the place of K that is absent
        new_top_logprobs=torch.cat([torch.cat([inputs.new_top_logprobs, nan], 1), nan.view(1, 2, 1)], 2),
        teacher_top_logprobs=torch.cat([torch.cat([inputs.teacher_top_logprobs, nan], 1), inf.expand(1, 2, 1)], 2),
        new_logprobs=torch.cat([inputs.new_logprobs, nan[..., 0]], 1),
        teacher_logprobs=torch.cat([inputs.teacher_logprobs, nan[..., 0]], 1),
        is_in_top=torch.cat([inputs.is_in_top, torch.zeros(1, 1, dtype=torch.bool)], 1),
        tail_weights=torch.cat([inputs.tail_weights, nan[..., 0]], 1),
        mask=torch.tensor([[True, False]]),
    )
    loss, kl = DISTILLATION_LOSSES[name].value(inputs, NO_OPTIONS)
    wide_loss, wide_kl = DISTILLATION_LOSSES[name].value(wide, NO_OPTIONS)
    assert (wide_loss[0, 0].item(), wide_kl[0, 0].item()) == (loss.item(), kl.item())
    assert (wide_loss[0, 1].item(), wide_kl[0, 1].item()) == (0, 0)
    torch.testing.assert_close(gradient_of(wide_loss.sum(), logits), gradient_of(loss.sum(), logits))


def test_log_ratios_and_weights_are_bounded() -> None:
    logits, teacher = distributions(spread=200.0)
    weights = importance_weights(torch.tensor([[-0.5, -0.5, -0.5, -60.0]]), torch.tensor([[-0.5, -1.0, -90.0, 0.0]]))
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(0.5), MAX_TAIL_WEIGHT, 0.0]]))
    inputs = inputs_of(logits, teacher, 0, int(logits.argmax()), weight=MAX_TAIL_WEIGHT)
    loss, kl = reverse_kl(inputs, NO_OPTIONS)
    assert float(kl) == MAX_TAIL_WEIGHT * 40
    assert gradient_of(loss.sum(), logits).isfinite().all()
