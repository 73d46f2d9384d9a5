"""A gradient that is not finite, or that nothing was trained on, changes nothing; the others change the same at every stage."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S, make_args
from ranks import Rank, started_ranks

from open_instruct.device import current_device
from open_instruct.learners.deepspeed_setup import engine_around
from open_instruct.learners.models import build_engine
from open_instruct.learners.optimizer_step import apply_gradient, discard_gradient, torch_optimizer

WIDTH = 24
STAGES = (0, 2, 3)
LAYOUTS = [*((stage, "float32") for stage in STAGES), (2, "bfloat16"), (3, "bfloat16")]
"""In bfloat16 stage 0 runs as stage 2."""
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
    from deepspeed.runtime.zero import GatheredParameters

    is_divided = engine.zero_optimization_stage() == 3
    with GatheredParameters(list(engine.module.parameters()), enabled=is_divided):
        return {name: parameter.detach().float().clone() for name, parameter in engine.module.named_parameters()}


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


class Sum(torch.nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


def norm_of_small_gradients(rank: Rank, stage: int) -> float:
    """Rank 0 has a gradient of 1 and 32 of 1/256 for each weight, rank 1 has 1/256 once; the norm of their mean.

    In bf16 1 + 1/256 is 1.
    """
    engine = make_engine(rank, stage, "bfloat16", Sum())
    gradients = [1.0] + [1 / 256] * 32 if rank.rank == 0 else [1 / 256] + [0.0] * 32
    for number, gradient in enumerate(gradients):
        engine.set_gradient_accumulation_boundary(number == len(gradients) - 1)
        loss = engine(torch.full((WIDTH,), gradient, dtype=torch.bfloat16))
        engine.backward(loss.float(), scale_wrt_gas=False)
    norm = apply_gradient(engine)
    assert norm is not None
    return norm


def changes(rank: Rank, stage: int, dtype: str) -> list[dict[str, torch.Tensor]]:
    """What each of three steps changes."""
    engine = make_engine(rank, stage, dtype)
    seen = [weights(engine)]
    for step in range(3):
        backward(rank, engine, step)
        apply_gradient(engine)
        seen.append(weights(engine))
    return [{name: after[name] - before[name] for name in before} for before, after in pairwise(seen)]


def checkpointed(rank: Rank, stage: int) -> dict[str, Any]:
    """A step of the tiny model, with activations kept and computed again."""
    device = current_device(kind="cpu", dtype="float32")
    norms, changed = [], []
    for gradient_checkpointing in (False, True):
        args = make_args(deepspeed_stage=stage, gradient_checkpointing=gradient_checkpointing, learning_rate=1e-3)
        engine = build_engine(args, device, world_size=rank.world_size)
        assert engine.module.model.is_gradient_checkpointing == gradient_checkpointing
        before = weights(engine)
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * number + rank.rank)
            tokens = torch.randint(3, 60, (2, 16 + 4 * rank.rank), generator=generator)  # ranks differ in length
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            engine.set_gradient_accumulation_boundary(number == 1)
            engine.backward(-engine(tokens, positions, 1.0)[0].mean(), scale_wrt_gas=False)
        norms.append(apply_gradient(engine))
        changed.append({name: after - before[name] for name, after in weights(engine).items()})
    return {"norms": norms, "same": same(*changed), "moved": any(bool(change.any()) for change in changed[0].values())}


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
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


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_a_discarded_gradient_changes_nothing(ray_session: Any, ranks: list[Any], stage: int, dtype: str) -> None:
    for seen in on_all(ray_session, ranks, emptied, stage, dtype):
        assert seen == {"unchanged": True, "as_without": True}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_in_bf16_are_added_up_in_fp32(ray_session: Any, ranks: list[Any], stage: int) -> None:
    mean = (1 + 32 / 256 + 1 / 256) / 2
    for norm in on_all(ray_session, ranks, norm_of_small_gradients, stage):
        assert norm == pytest.approx(mean * WIDTH**0.5, rel=1e-5)


def test_first_steps_in_bf16_are_the_same_at_every_stage(ray_session: Any, ranks: list[Any]) -> None:
    reference = on_all(ray_session, ranks, changes, 0, "float32")[0]
    for stage in STAGES:
        first, second = on_all(ray_session, ranks, changes, stage, "bfloat16")
        for step, (change, exact) in enumerate(zip(first, reference, strict=True)):
            assert same(change, second[step])
            off = sum(float((change[name] - exact[name]).square().sum()) for name in exact)
            whole = sum(float(value.square().sum()) for value in exact.values())
            assert (off / whole) ** 0.5 < 0.05, (stage, step)


@pytest.mark.parametrize("stage", STAGES)
def test_activations_that_are_computed_again_give_the_same_step(ray_session: Any, ranks: list[Any], stage: int) -> None:
    first, second = on_all(ray_session, ranks, checkpointed, stage)
    assert first == second
    assert first["norms"][0] == first["norms"][1] > 0
    assert first["same"]
    assert first["moved"]
