"""A gradient that is not finite, or that nothing was trained on, changes nothing; the others change the same at every stage."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S, make_args
from ranks import Rank, started_ranks

from open_instruct.device import current_device
from open_instruct.learner_models import engine_around
from open_instruct.optimizer_step import apply_gradient, discard_gradient, torch_optimizer

WIDTH = 24
STAGES = (0, 2, 3)
LEARNING_RATE = 1e-2


@pytest.fixture(scope="module")
def ranks(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two of them; a module is enough, because each test builds its own engines."""
    with started_ranks(ray_session, 2, tmp_path_factory.mktemp("ranks"), __name__) as actors:
        yield actors


def on_all(ray: Any, ranks: list[Any], function: Any, *args: Any) -> list[Any]:
    return ray.get([rank.call.remote(function, *args) for rank in ranks], timeout=TIMEOUT_S)


# --- what runs in a rank ----------------------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def make_engine(rank: Rank, stage: int, dtype: str, model: torch.nn.Module | None = None) -> Any:
    args = make_args(
        deepspeed_stage=stage,
        model_dtype=dtype,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        total_episodes=16 * 100,
    )
    device = current_device(kind="cpu", dtype=dtype)
    torch.manual_seed(0)
    model = (model or TwoLayers()).to(device.torch_dtype)
    return engine_around(model, args, device, world_size=rank.world_size)


def backward(rank: Rank, engine: Any, step: int, *, poison: float = 1.0, scale: float = 1.0) -> None:
    """Two micro-batches; `poison` multiplies the loss of the second rank's first one."""
    for number in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * number + rank.rank)
        inputs = torch.randn(5, WIDTH, generator=generator)
        engine.set_gradient_accumulation_boundary(number == 1)
        loss = engine(inputs.to(next(engine.module.parameters()).dtype)).float().square().mean() * scale
        engine.backward(loss * poison if (rank.rank, number) == (1, 0) else loss, scale_wrt_gas=False)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    from open_instruct.weight_sync import DeepSpeedWeightSource

    source = DeepSpeedWeightSource(engine.module, zero_stage=engine.zero_optimization_stage())
    return {name: tensor.detach().float().clone() for name, tensor in source}


def moments(engine: Any) -> list[torch.Tensor]:
    states = torch_optimizer(engine).state.values()
    return [state[name].detach().clone() for state in states for name in ("exp_avg", "exp_avg_sq", "step")]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        one, other = list(one.values()), list(other.values())
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def poisoned(rank: Rank, stage: int, dtype: str, poison: float, denominator: float | None) -> dict[str, Any]:
    """A good step, a poisoned one, a good one; and the two good ones alone."""
    scale = denominator or 1.0
    engine, twin = make_engine(rank, stage, dtype), make_engine(rank, stage, dtype)
    for one in (engine, twin):
        backward(rank, one, 0, scale=scale)
        apply_gradient(one, denominator=denominator)
    before = weights(engine), moments(engine), engine.get_lr()
    backward(rank, engine, 1, poison=poison, scale=scale)
    norm = apply_gradient(engine, denominator=denominator)
    after = weights(engine), moments(engine), engine.get_lr()
    for one in (engine, twin):
        backward(rank, one, 2, scale=scale)
    norms = [apply_gradient(one, denominator=denominator) for one in (engine, twin)]
    return {
        "norm": norm,
        "unchanged": same(before[0], after[0]) and same(before[1], after[1]) and before[2] == after[2],
        "norms": norms,
        "as_without": same(weights(engine), weights(twin)) and same(moments(engine), moments(twin)),
    }


def emptied(rank: Rank, stage: int, dtype: str) -> dict[str, Any]:
    """A good step, then one of which nothing was trained on, then a good one; and the two good ones alone."""
    engine, twin = make_engine(rank, stage, dtype), make_engine(rank, stage, dtype)
    for one in (engine, twin):
        backward(rank, one, 0)
        apply_gradient(one)
    before = weights(engine), moments(engine), engine.get_lr()
    backward(rank, engine, 1, scale=0.0)
    discard_gradient(engine)
    after = weights(engine), moments(engine), engine.get_lr()
    for one in (engine, twin):
        backward(rank, one, 2)
        apply_gradient(one)
    return {
        "unchanged": same(before[0], after[0]) and same(before[1], after[1]) and before[2] == after[2],
        "as_without": same(weights(engine), weights(twin)) and same(moments(engine), moments(twin)),
    }


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_changes_nothing(
    ray_session: Any, ranks: list[Any], stage: int, dtype: str
) -> None:
    for poison, denominator in ((float("nan"), None), (float("inf"), 7.0)):
        first, second = on_all(ray_session, ranks, poisoned, stage, dtype, poison, denominator)
        assert first == second
        assert first["norm"] is None
        assert first["unchanged"]
        assert first["norms"][0] == first["norms"][1] > 0
        assert first["as_without"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_discarded_gradient_changes_nothing(ray_session: Any, ranks: list[Any], stage: int, dtype: str) -> None:
    for seen in on_all(ray_session, ranks, emptied, stage, dtype):
        assert seen == {"unchanged": True, "as_without": True}
