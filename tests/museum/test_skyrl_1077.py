"""A run that asked for an adapter trains the whole model."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.learners.lora import add_adapter

EXHIBIT = Exhibit(
    reports=("NovaSky-AI/SkyRL #1077",),
    subject="engines and weights",
    happened="The rank and the scale of the adapter that a request asked for were not passed on to the trainer, which "
    "without them trains every weight, and said nothing.",
    here="With `--use_peft` only the adapters' matrices have a gradient, and layers to adapt that the model lacks are "
    "an error (`learners/lora.py`).",
)
RANK = 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 16, bias=False)


def check(prepare: Callable[[Model], None]) -> None:
    model = Model()
    prepare(model)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert sum(rows * columns for rows, columns in trained.values()) == RANK * (8 + 8), trained


def theirs(model: Model, lora_r: int | None = None) -> None:
    model.requires_grad_(lora_r is None)


def ours(model: Model) -> None:
    add_adapter(model, make_args(use_peft=True, lora_r=RANK, lora_target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="nothing_like_it"):
        add_adapter(Model(), make_args(use_peft=True, lora_target_modules=["nothing_like_it"]))


def test_rank_that_gets_lost_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_adapter_alone_is_trained_here() -> None:
    check(ours)
