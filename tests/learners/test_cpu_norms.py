"""Norms with fewer passes over memory compute what the model's own norms do, and so do their gradients."""

import pytest
import torch
from model_families import family_config
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from open_instruct.learners.cpu_norms import use_fewer_passes

EPS = 1e-3


def make_norm(size: int) -> LlamaRMSNorm:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(size, eps=EPS)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size))
    use_fewer_passes(norm)
    assert type(norm) is not LlamaRMSNorm
    return norm


def in_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize("shape", [(37, 48), (3, 11, 48), (2, 5, 4, 48), (1, 1, 48)])
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    norm = make_norm(48)
    values, grad = 3 * torch.randn(shape), torch.randn(shape)
    x, exact_x, exact_weight = values.requires_grad_(), exact(values), exact(norm.weight)
    out, exact_out = norm(x), in_float64(exact_x, exact_weight)
    gradients = torch.autograd.grad(out, [x, norm.weight], grad)
    exact_gradients = torch.autograd.grad(exact_out, [exact_x, exact_weight], grad.double())
    for ours, theirs in zip([out, *gradients], [exact_out, *exact_gradients], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def test_gradients_that_are_views_are_taken_as_they_lie() -> None:
    norm, values = make_norm(8), torch.randn(2, 5, 4, 8, requires_grad=True)
    exact_values, exact_weight = exact(values), exact(norm.weight)
    for out in (norm(values), in_float64(exact_values, exact_weight)):
        (out.transpose(1, 2)[:, 1:] ** 3).sum().backward()
    for ours, theirs in ((values, exact_values), (norm.weight, exact_weight)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_weights_that_are_frozen_get_no_gradient() -> None:
    norm = make_norm(8).requires_grad_(False)
    values = torch.randn(4, 8, requires_grad=True)
    norm(values).sum().backward()
    assert values.grad is not None
    assert norm.weight.grad is None


@pytest.mark.parametrize(("family", "is_changed"), [
    ("qwen3", True),
    ("llama", True),
    ("olmo2", False),  # multiplies before it rounds
    ("gemma3_text", False),  # multiplies by 1 + weight
])  # fmt: skip
def test_only_norms_that_compute_what_llamas_do_change(family: str, is_changed: bool) -> None:
    model = AutoModelForCausalLM.from_config(family_config(family)).eval()
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        before, kinds = model(tokens).logits, [type(module) for module in model.modules()]
        use_fewer_passes(model)
        after = model(tokens).logits
    changed = {old.__name__ for old, module in zip(kinds, model.modules(), strict=True) if type(module) is not old}
    assert bool(changed) == is_changed
    assert all("RMSNorm" in name for name in changed)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_other_dtypes_keep_their_norms() -> None:
    norm = LlamaRMSNorm(8).to(torch.bfloat16)
    use_fewer_passes(norm)
    assert type(norm) is LlamaRMSNorm
