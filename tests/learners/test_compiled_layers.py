"""Layers that torch compiles compute what they compute without, in every layout, and are compiled once for batches alike."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trained_rows
from conftest import make_args
from model_families import family_config
from trained_rows import LAYOUTS, Groups, Outcome, batch_of, make_groups

from open_instruct.config import model_checks
from open_instruct.config.model_checks import layers_can_be_compiled
from open_instruct.learners.attention import register
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.models import compile_layers, compute_again

GROUPS = make_groups([(90, [50, 1, 83]), (40, [4, 61]), (7, [9])])
OTHERS = make_groups([(33, [20, 11, 53]), (10, [44, 31]), (17, [19]), (12, [5])])


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outcome(
    groups: Groups,
    layout: str,
    kind: str,
    *,
    compiled: bool,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    config = family_config("qwen3")
    config.head_dim = 64
    batch = batch_of(groups, layout)
    options: dict[str, Any] = {"kind": kind, "dtype": dtype} | ({"prepare": compile_layers} if compiled else {})
    return trained_rows.outcome(config, batch, attention, **options)


def assert_same(ours: Outcome, theirs: Outcome, *, within: float) -> None:
    assert (ours[0] - theirs[0]).abs().max() <= within
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert float((ours[1][name] - gradient).norm() / gradient.norm()) <= within, name


@pytest.mark.extended
def test_a_layer_may_be_another_one_when_it_is_computed_again() -> None:
    """Torch may compile a layer anew between its two forward passes, and keep other tensors: here it compiles none."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config("qwen3"), attn_implementation=register("sdpa")).train()
    compile_layers(model)
    compute_again(model, make_args(compile_model=True, gradient_checkpointing=True))
    learner, gradients = LogProbModel(model), []
    arguments = trained_rows.arguments_of(batch_of(GROUPS, "padded"))
    for stance in ("default", "force_eager"):
        logprobs, _, _ = learner(**arguments)
        with torch.compiler.set_stance(stance):
            logprobs.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        model.zero_grad()
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["packed", "padded, shared"])
def test_log_probs_and_gradients_are_the_same(layout: str) -> None:
    assert_same(
        outcome(GROUPS, layout, "cpu", compiled=True), outcome(GROUPS, layout, "cpu", compiled=False), within=1e-5
    )
    compiled = num_graphs()
    assert compiled > 0
    assert_same(
        outcome(OTHERS, layout, "cpu", compiled=True), outcome(OTHERS, layout, "cpu", compiled=False), within=1e-5
    )
    assert num_graphs() == compiled  # other lengths, and other sequences in the rows


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "qwen3_moe"])
def test_other_families(family: str) -> None:
    for layout in ("padded, shared", "packed"):
        config, batch = family_config(family), batch_of(GROUPS, layout)
        ours = trained_rows.outcome(config, batch, "sdpa", prepare=compile_layers)
        assert_same(ours, trained_rows.outcome(config, batch, "sdpa"), within=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_the_same_on_a_gpu_with_flash_attention(layout: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    both = [
        outcome(GROUPS, layout, "cuda", compiled=compiled, attention="flash_attention_2", dtype=torch.bfloat16)
        for compiled in (True, False)
    ]
    assert_same(*both, within=20 * 2.0**-8)


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(layers_can_be_compiled(make_args(compile_model=True)))
    assert not list(layers_can_be_compiled(make_args(deepspeed_stage=3)))
    [mistake] = layers_can_be_compiled(make_args(compile_model=True, deepspeed_stage=3))
    assert mistake.startswith("--compile_model True --deepspeed_stage 3: layers that communicate are not compiled.")
    monkeypatch.setattr(model_checks.shutil, "which", lambda name: None)
    [mistake] = layers_can_be_compiled(make_args(compile_model=True))
    assert "there is no C++ compiler (g++, clang++)" in mistake
