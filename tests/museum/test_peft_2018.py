"""An adapter of the head is merged into the embedding, which is the same tensor."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL, make_args
from exhibit import Exhibit

from open_instruct.config.model_checks import adapters_have_layers
from open_instruct.learners.lora import add_adapter
from open_instruct.learners.weight_sync import DeepSpeedWeightSource

EXHIBIT = Exhibit(
    reports=("huggingface/peft #2018",),
    subject="engines and weights",
    happened="In models whose head is their embedding, an adapter of `lm_head` was merged into the one tensor that both "
    "share, so the merged model also read its prompts through the changed embedding.",
    here="The head gets no adapter. `--lora_target_modules lm_head` is refused before the run, with the layers that "
    "may be named (`config/model_checks.py`), and `all-linear` leaves the head out.",
)
EMBEDDING = "model.embed_tokens.weight"
Weights = Mapping[str, torch.Tensor]
Outcome = Weights | str
"""The merged weights, or why the run is refused before it starts."""


def load() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def check(merged: Callable[[Any, str], Outcome]) -> None:
    before = load().state_dict()
    weights = merged(load(), "all-linear")
    assert not isinstance(weights, str)
    assert torch.equal(weights[EMBEDDING], before[EMBEDDING])
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items())
    weights = merged(load(), "lm_head")
    assert isinstance(weights, str) or torch.equal(weights[EMBEDDING], before[EMBEDDING])


def theirs(model: Any, target: str) -> Outcome:
    layers = [model.model.layers[0].self_attn.q_proj] if target == "all-linear" else [model.lm_head]
    with torch.no_grad():
        for layer in layers:
            layer.weight += 0.1
    return model.state_dict()


def ours(model: Any, target: str) -> Outcome:
    args = make_args(use_peft=True, lora_target_modules=[target])
    if mistakes := list(adapters_have_layers(args)):
        return "\n".join(mistakes)
    add_adapter(model, args)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)
    return dict(DeepSpeedWeightSource(model, zero_stage=0))


def test_merging_into_the_shared_tensor_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_embedding_is_as_before_here() -> None:
    check(ours)
