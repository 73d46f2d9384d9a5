"""The engine goes on sampling from the base model while the adapter is trained."""

from collections.abc import Callable, Mapping

import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.learners.lora import Adapters, add_adapter, merged_name

EXHIBIT = Exhibit(
    reports=("modelscope/ms-swift #9855", "vllm-project/vllm-omni #5369"),
    subject="engines and weights",
    happened="Engines received every update of the adapter, and the asynchronous requests did not name it: all samples "
    "came from the base model. The reward never rose, and no message told why.",
    here="Engines get merged weights under the names of the base model and know of no adapter, so a request cannot "
    "leave it out (`learners/lora.py`, `learners/weight_sync.py`). Each new engine is compared with the learners "
    "before it serves (`run/weight_agreement.py`).",
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(6, 6, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.q_proj(inputs)


def check(weights_of: Callable[[Model], Mapping[str, torch.Tensor]]) -> None:
    """An engine with the weights that were sent computes what the learner computes with its adapter."""
    generator = torch.Generator().manual_seed(0)
    learner, engine = Model(), Model()
    add_adapter(learner, make_args(use_peft=True, lora_r=2, lora_target_modules=["q_proj"]))
    with torch.no_grad():
        for parameter in learner.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    engine.load_state_dict(dict(weights_of(learner)))
    inputs = torch.randn(5, 6, generator=generator)
    torch.testing.assert_close(engine(inputs), learner(inputs))


def theirs(learner: Model) -> dict[str, torch.Tensor]:
    """The adapter lies in the engine, and the request uses the base."""
    return {name: p.data for given, p in learner.named_parameters() if (name := merged_name(given)) is not None}


def ours(learner: Model) -> dict[str, torch.Tensor]:
    adapters = Adapters(learner)
    return {name: adapters.merged(name, weight) for name, weight in theirs(learner).items()}


def test_request_without_the_adapter_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_engines_get_merged_weights_here() -> None:
    check(ours)
