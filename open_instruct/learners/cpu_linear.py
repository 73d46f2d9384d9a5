"""Matrix products in float32 through oneDNN, for learners on CPU: of linear layers, and of the head (`logprobs.py`).

For float32 torch 2.13 calls MKL, which uses only AVX2 kernels on AMD's processors. On an AMD processor with AVX-512 oneDNN's
products are 1.3 to 2.3 times as fast (two cores, 1,800 tokens, 256 x 768 weights; 1.1 to 2.7 times with the head of a vocabulary
of 152 k; `benchmarks/cpu_products.py`), and sums are as exact. This module calls `mkldnn._linear_pointwise`, the operator through
which torch offers oneDNN's product in float32 to its compiler. (The setting `torch.backends.mkldnn.matmul.fp32_precision =
"bf16"` would select oneDNN too, but with it torch's attention of short sequences takes three times as long, and processors with
AMX would round to bfloat16.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def pays_off(dtype: torch.dtype) -> bool:
    """Whether this processor computes products in `dtype` faster with oneDNN."""
    return dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"


def product(left_NK: Tensor, right_OK: Tensor) -> Tensor:
    """(N, O): left @ right.T, outside autograd."""
    on_cpu = left_NK.device.type == "cpu"
    return _product(left_NK, right_OK) if on_cpu and pays_off(left_NK.dtype) else left_NK @ right_OK.T


def use_onednn(model: torch.nn.Module) -> None:
    """Make the plain linear layers of `model` compute with oneDNN. Their weights stay as they are."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and pays_off(module.weight.dtype):
            module.__class__ = OneDnnLinear


class OneDnnLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input.flatten(0, -2), weight, bias).view(*input.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  # the decorator hides the name of `ctx`
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        grad_NO = grad.flatten(0, -2)
        return (
            _product(grad_NO, weight.t()).view(input.shape) if wants_input else None,
            _gradient_of_weight(grad_NO, input.flatten(0, -2)) if wants_weight else None,
            grad_NO.sum(0) if wants_bias else None,
        )


def _gradient_of_weight(grad_NO: Tensor, input_NK: Tensor) -> Tensor:
    """(O, K). The left factor of a product is copied if it is transposed, so the narrower of the two is put on the left."""
    if grad_NO.shape[1] <= input_NK.shape[1]:
        return _product(grad_NO.t(), input_NK.t())
    return _product(input_NK.t(), grad_NO.t()).t().contiguous()


def _product(left_NK: Tensor, right_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """(N, O): left @ right.T, plus the bias."""
    return torch.ops.mkldnn._linear_pointwise(left_NK, right_OK, bias_O, "none", [], "")
