"""oneDNN's linear layers compute what torch's do, and so do their gradients."""

import pytest
import torch
from torch import nn

from open_instruct.learners import cpu_linear
from open_instruct.learners.cpu_linear import OneDnnLinear, use_onednn


def layers(*, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, fast = nn.Linear(48, 80, bias=bias), nn.Linear(48, 80, bias=bias)
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = OneDnnLinear
    return plain, fast


@pytest.mark.parametrize("shape", [(37, 48), (3, 11, 48), (1, 1, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool) -> None:
    plain, fast = layers(bias=bias)
    exact = nn.Linear(48, 80, bias=bias).double()
    exact.load_state_dict(plain.state_dict())
    values = torch.randn(shape)
    grad = torch.randn(*shape[:-1], 80)
    given, wanted = values.clone().requires_grad_(), values.double().requires_grad_()
    out, exact_out = fast(given), exact(wanted)
    gradients = torch.autograd.grad(out, [given, *fast.parameters()], grad)
    exact_gradients = torch.autograd.grad(exact_out, [wanted, *exact.parameters()], grad.double())
    for ours, theirs in zip([out, *gradients], [exact_out, *exact_gradients], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_views_are_taken_as_they_lie() -> None:
    plain, fast = layers(bias=True)
    values = torch.randn(6, 5, 48)
    for layer in (plain, fast):
        layer(values).transpose(0, 1)[1:].square().sum().backward()
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-5)


def test_weights_that_are_frozen_get_no_gradient() -> None:
    _, fast = layers(bias=True)
    fast.requires_grad_(False)
    values = torch.randn(4, 48, requires_grad=True)
    fast(values).sum().backward()
    assert values.grad is not None
    assert (fast.weight.grad, fast.bias.grad) == (None, None)


@pytest.mark.parametrize(("capability", "dtype", "expected"), [
    ("AVX512", torch.float32, OneDnnLinear),
    ("AVX512", torch.bfloat16, nn.Linear),
    ("AVX2", torch.float32, nn.Linear),
])  # fmt: skip
def test_layers_change_where_it_pays_off(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype, expected: type
) -> None:
    monkeypatch.setattr(cpu_linear.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(dtype)
    use_onednn(model)
    assert [type(layer) for layer in model] == [expected, nn.LayerNorm]
