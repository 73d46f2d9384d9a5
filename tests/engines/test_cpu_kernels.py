"""The norms that eager engines on CPU compute with, beside vLLM's own."""

import pytest
import torch
from vllm import ir

from open_instruct.device import CPU_KERNELS, CPU_NORMS
from open_instruct.engines.vllm_plugin import register_cpu_kernels

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_cpu_kernels()
    register_cpu_kernels()  # every process of an engine may do it more than once


def both(name: str, *arguments: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """What the kernel computes, and what vLLM's native implementation does."""
    op, results = getattr(ir.ops, name), []
    for provider in (CPU_KERNELS, "native"):
        with op.set_priority([provider, "native"]):
            assert op.dispatch(*arguments, 1e-6).provider == provider
            results.append(op(*(one.clone(memory_format=torch.preserve_format) for one in arguments), 1e-6))
    return [one if isinstance(one, tuple) else (one,) for one in results]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm(dtype: torch.dtype) -> None:
    """Whole rows, and the heads of queries and keys, which are views of a larger tensor."""
    torch.manual_seed(0)
    whole = torch.randn(33, 256, dtype=dtype)
    heads = torch.randn(33, 512, dtype=dtype)[:, 128:384].view(33, 8, 32)
    assert not heads.is_contiguous()
    for x in (whole, heads):
        ours, native = both("rms_norm", x, torch.randn(x.shape[-1], dtype=dtype))
        torch.testing.assert_close(ours, native, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 33, 256, dtype=dtype)
    ours, native = both("fused_add_rms_norm", x, residual, torch.randn(256, dtype=dtype))
    torch.testing.assert_close(ours, native, rtol=DTYPES[dtype], atol=2 * DTYPES[dtype])


def test_what_the_kernel_cannot_take_is_vllms() -> None:
    x, weight = torch.randn(4, 256), torch.randn(256)
    with ir.ops.rms_norm.set_priority([CPU_KERNELS, "native"]):
        assert ir.ops.rms_norm.dispatch(x, None, 1e-6).provider == "native"
        assert ir.ops.rms_norm.dispatch(x, weight.bfloat16(), 1e-6).provider == "native"
        assert ir.ops.rms_norm.dispatch(x, weight, 1e-6, 128).provider == "native"
    with ir.ops.fused_add_rms_norm.set_priority([CPU_KERNELS, "native"]):
        halves = torch.randn(4, 512)[:, :256]
        assert ir.ops.fused_add_rms_norm.dispatch(x, halves, weight, 1e-6).provider == "native"


def test_these_are_all_norms_with_a_kernel() -> None:
    assert all(CPU_KERNELS in getattr(ir.ops, name).supported_providers() for name in CPU_NORMS)
