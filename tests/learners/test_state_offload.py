"""Training gives the same bits whether or not its states leave the device in between, and nothing is left on the device."""

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S, make_args

from open_instruct.device import Device, current_device
from open_instruct.device_memory import DeviceMemory
from open_instruct.learners import state_offload
from open_instruct.learners.offload_tags import GRADIENTS, OPTIMIZER, REFERENCE, TAGS, WEIGHTS
from open_instruct.learners.state_offload import SMALL_BYTES, StateOffload

VOCABULARY, WIDTH, NUM_LAYERS = 64, 96, 3
NUM_STEPS = 3


class TinyModel(torch.nn.Module):
    """Layers, a buffer, and a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(32, WIDTH))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Rank:
    """One rank that trains a tiny model with DeepSpeed."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", DS_ACCELERATOR="cpu")
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        start_deepspeed()
        self.rank = rank
        self.world_size = world_size

    def train(self, stage: int, dtype: str, *, with_offload: bool) -> tuple[dict[str, str], dict[str, Any]]:
        """Train from scratch; digests of all states at the end, and what was seen while states were away."""
        self.device = current_device(kind="cpu", dtype=dtype)
        self.old_tensors = {
            number for number, _ in floating_storages()
        }  # DeepSpeed never lets go of some of an earlier engine
        engine, ref_model = self._build(stage)
        states = StateOffload(self.device, engine, ref_model)
        seen: dict[str, Any] = {"left": [], "weights": []}
        for step in range(NUM_STEPS):
            for micro_batch in range(2):
                self._backward(engine, ref_model, step, micro_batch)
                if with_offload:  # gradients are being added up
                    states.offload()
                    self._note_what_is_left(step, seen)
                    states.reload()
            engine.step()
            if with_offload:
                self._hand_over(step, engine, states, seen)
        digests = self._digests(engine)
        engine.destroy()
        return digests, seen

    def _build(self, stage: int) -> tuple[Any, Any]:
        import deepspeed

        from open_instruct.learners.deepspeed_setup import deepspeed_config

        args = make_args(deepspeed_stage=stage, model_dtype=self.device.dtype)
        config = deepspeed_config(args, self.device, world_size=self.world_size)
        torch.manual_seed(0)
        model, ref_model = (TinyModel().to(self.device.torch_dtype) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        ref_model.eval().requires_grad_(False)
        if stage == 3:
            ref_model, *_ = deepspeed.initialize(model=ref_model, config=config)
        return engine, ref_model

    def _backward(self, engine: Any, ref_model: Any, step: int, micro_batch: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + self.rank)
        tokens = torch.randint(VOCABULARY, (4, 16), generator=generator)
        with torch.no_grad():
            target = ref_model(tokens).float().softmax(-1)
        engine.set_gradient_accumulation_boundary(micro_batch == 1)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), target.flatten(0, 1))
        engine.backward(loss, scale_wrt_gas=False)

    def _note_what_is_left(self, step: int, seen: dict[str, Any]) -> None:
        if step == 1:  # with a past; one look at everything that Python knows takes a while
            seen["left"] += [text for number, text in floating_storages() if number not in self.old_tensors]

    def _hand_over(self, step: int, engine: Any, states: StateOffload, seen: dict[str, Any]) -> None:
        """As between a step and generation: engines get the weights while all the rest is away."""
        states.offload([OPTIMIZER, GRADIENTS, REFERENCE])
        seen["weights"].append(self._weights_digest(engine))
        states.offload([WEIGHTS])
        self._note_what_is_left(step, seen)
        states.reload([REFERENCE, WEIGHTS])
        states.reload()
        assert not states.offloaded

    def _weights_digest(self, engine: Any) -> str:
        from open_instruct.learners.weight_sync import DeepSpeedWeightSource

        stage = engine.zero_optimization_stage()
        return digest([tensor for _, tensor in DeepSpeedWeightSource(engine.module, zero_stage=stage)])

    def _digests(self, engine: Any) -> dict[str, str]:
        wrapper = engine.optimizer
        optimizer = getattr(wrapper, "optimizer", wrapper)
        masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        masters += getattr(wrapper, "fp32_partitioned_groups_flat", [])
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert masters
        assert moments
        return {"weights": self._weights_digest(engine), "masters": digest(masters), "moments": digest(moments)}


def start_deepspeed() -> None:  # apart: cloudpickle takes `deepspeed.ops` for `torch.ops` where both packages are used
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def digest(tensors: list[torch.Tensor]) -> str:
    content = b"".join(tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    assert content
    return hashlib.sha256(content).hexdigest()


def floating_storages() -> list[tuple[int, str]]:
    """Storages in this process that are worth moving, each with a tensor of it. Training has no bytes; copies are bytes."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.is_floating_point()]
    resident = [t for t in tensors if t.device.type == "cpu" and t.untyped_storage().nbytes() >= SMALL_BYTES]
    return [(t.untyped_storage()._cdata, f"{t.dtype} {tuple(t.shape)}") for t in resident]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def ranks(request: pytest.FixtureRequest, ray_session: Any, tmp_path_factory: Any) -> Iterator[list[Any]]:
    ray_session.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    ray_session.cloudpickle.register_pickle_by_value(sys.modules["conftest"])
    rendezvous = str(tmp_path_factory.mktemp("ranks") / "store")
    env = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    rank_class = ray_session.remote(Rank).options(num_cpus=0, runtime_env=env)
    actors = [rank_class.remote(rank, request.param, rendezvous) for rank in range(request.param)]
    yield actors
    for actor in actors:
        ray_session.kill(actor)


def check_same_bits(ray: Any, ranks: list[Any], stage: int, dtype: str) -> None:
    plain = ray.get([rank.train.remote(stage, dtype, with_offload=False) for rank in ranks], timeout=TIMEOUT_S)
    moved = ray.get([rank.train.remote(stage, dtype, with_offload=True) for rank in ranks], timeout=TIMEOUT_S)
    for (expected, _), (digests, seen) in zip(plain, moved, strict=True):
        assert digests == expected
        assert seen["left"] == []
        assert len(set(seen["weights"])) == NUM_STEPS  # each step changed them
        assert seen["weights"][-1] == digests["weights"]


@pytest.mark.extended
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_gives_the_same_bits(ray_session: Any, ranks: list[Any], stage: int) -> None:
    check_same_bits(ray_session, ranks, stage, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_in_bf16_gives_the_same_bits(ray_session: Any, ranks: list[Any], stage: int) -> None:
    """With master weights apart from the weights, as on GPU."""
    check_same_bits(ray_session, ranks, stage, "bfloat16")


# --- without DeepSpeed ------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    """What DeepSpeed gives at stage 0 in fp32: the module and the optimizer as they are, after a step."""
    module = TinyModel()
    engine = SimpleNamespace(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters()),
        parameters=module.parameters,
        buffers=module.buffers,
    )
    module(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    engine.optimizer.step()
    return engine


@pytest.fixture
def cpu() -> Device:
    return current_device(kind="cpu")


def bytes_held(tensors: Callable[[], list[torch.Tensor]]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors()}.values())


def test_each_tag_moves_what_is_its_own(engine: Any, cpu: Device) -> None:
    module, optimizer = engine.module, engine.optimizer
    held = {
        WEIGHTS: lambda: [module.positions, *module.parameters()],
        OPTIMIZER: lambda: [value for state in optimizer.state.values() for value in state.values()],
        GRADIENTS: lambda: [parameter.grad for parameter in module.parameters()],
    }
    states = StateOffload(cpu, engine)
    for tag, tensors in held.items():
        before = {other: bytes_held(held[other]) for other in held}
        states.offload([tag])
        assert states.offloaded == {tag}
        assert bytes_held(tensors) < 0.1 * before[tag]
        assert all(bytes_held(held[other]) == before[other] for other in held if other != tag)
        states.reload([tag])
        assert {other: bytes_held(held[other]) for other in held} == before
    assert not states.offloaded


def test_views_are_right_again_and_small_tensors_never_away(engine: Any, cpu: Device) -> None:
    weight = engine.module.layers[0].weight
    view, before = weight.data.flatten()[5:500], weight.detach().clone()
    bias = engine.module.layers[0].bias
    states = StateOffload(cpu, engine)
    states.offload()
    assert view.untyped_storage().nbytes() == 0
    assert bias.untyped_storage().nbytes() < SMALL_BYTES
    assert float(bias.detach().sum()) == pytest.approx(float(bias.detach().sum()))
    states.reload()
    assert torch.equal(weight, before)
    assert torch.equal(view, before.flatten()[5:500])
    assert view.data_ptr() == weight.data_ptr() + 5 * weight.element_size()


def test_moving_twice_is_moving_once(engine: Any, cpu: Device) -> None:
    before = digest(list(engine.module.parameters()))
    states = StateOffload(cpu, engine)
    states.reload()
    states.offload([WEIGHTS])
    states.offload([WEIGHTS, OPTIMIZER])
    states.reload([WEIGHTS])
    states.reload()
    assert digest(list(engine.module.parameters())) == before


def test_the_reference_model_goes_alone(engine: Any, cpu: Device) -> None:
    reference = TinyModel()
    before = digest(list(reference.parameters()))
    states = StateOffload(cpu, engine, reference)
    states.offload([REFERENCE])
    assert reference.head.weight.untyped_storage().nbytes() == 0
    assert engine.module.head.weight.untyped_storage().nbytes() > 0
    states.reload([REFERENCE])
    assert digest(list(reference.parameters())) == before


def test_buckets_are_given_back_but_not_copied(engine: Any, cpu: Device) -> None:
    buffer = torch.zeros(10**6)
    bucket = SimpleNamespace(buffer=buffer, elements=0)
    engine.optimizer.ipg_buckets = {torch.float32: bucket}
    states = StateOffload(cpu, engine)
    states.offload([GRADIENTS])
    assert buffer.untyped_storage().nbytes() == 0
    assert sum(moved.content.numel() for moved in states._moved[GRADIENTS] if moved.content is not None) < 10**6
    states.reload([GRADIENTS])
    assert buffer.untyped_storage().nbytes() == 4 * 10**6
    bucket.elements = 5
    with pytest.raises(AssertionError, match="in the middle of a backward pass"):
        states.offload([GRADIENTS])


def test_what_numpy_has_seen_stays_and_is_said(engine: Any, cpu: Device, caplog: pytest.LogCaptureFixture) -> None:
    weight = engine.module.layers[0].weight
    weight.detach().numpy()
    StateOffload(cpu, engine).offload([WEIGHTS])
    assert weight.untyped_storage().nbytes() > 0
    assert engine.module.layers[1].weight.untyped_storage().nbytes() == 0
    assert f"weights: {weight.nbytes} bytes stay" in caplog.text


@pytest.mark.parametrize("keeps", [False, True])
def test_main_memory_is_taken_once_where_it_is_kept(
    engine: Any, cpu: Device, monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> None:
    taken: list[int] = []
    take = DeviceMemory.host_buffer
    monkeypatch.setattr(DeviceMemory, "host_buffer", lambda memory, size: (taken.append(size), take(memory, size))[1])
    monkeypatch.setattr(DeviceMemory, "keeps_host_buffers", keeps)
    states = StateOffload(cpu, engine)
    before = digest(list(engine.module.parameters()))
    states.offload()
    held = sum(moved.num_bytes for tag in TAGS for moved in states._moved[tag])
    assert sum(taken) == held > 0
    states.reload()
    for _ in range(2):
        states.offload([WEIGHTS, OPTIMIZER])
        states.offload()
        states.reload()
    assert sum(taken) == (held if keeps else 3 * held)
    assert digest(list(engine.module.parameters())) == before


def test_what_found_no_room_on_the_device_comes_back_later(
    engine: Any, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(list(engine.module.parameters()))
    states = StateOffload(cpu, engine)
    states.offload()

    num_restored, restore = 0, state_offload._Moved.restore

    def until_full(moved: Any) -> None:
        nonlocal num_restored
        if num_restored == 2:
            raise torch.OutOfMemoryError("no room")
        restore(moved)
        num_restored += 1

    with monkeypatch.context() as full:
        full.setattr(state_offload._Moved, "restore", until_full)
        with pytest.raises(torch.OutOfMemoryError):
            states.reload()
    assert WEIGHTS in states.offloaded
    states.reload()
    assert not states.offloaded
    assert digest(list(engine.module.parameters())) == before


def test_what_was_released_is_measured(engine: Any) -> None:
    class MeasuringMemory(DeviceMemory):
        def in_use_bytes(self) -> int:
            return bytes_held(lambda: list(engine.module.parameters()))

    class Measuring(Device):
        @property
        def memory(self) -> DeviceMemory:
            return MeasuringMemory("cpu")

    device = Measuring("cpu", "float32", "sdpa")
    held = device.memory.in_use_bytes()
    assert 0.9 * held < StateOffload(device, engine).offload([WEIGHTS]) <= held


def test_freed_memory_goes_back_before_engines_wake(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Device, "synchronize", lambda _: calls.append("synchronize"))
    monkeypatch.setattr(DeviceMemory, "return_freed", lambda _: calls.append("return_freed"))
    StateOffload(current_device(kind="cpu"), engine).reload()  # all of it is there already, as after a step
    assert calls == ["synchronize", "return_freed"]


def test_the_second_share_of_stage_3_moves_with_the_weights(engine: Any, cpu: Device) -> None:
    parameter = engine.module.layers[0].weight
    parameter.ds_secondary_tensor = torch.ones(2**18)
    states = StateOffload(cpu, engine)
    states.offload([WEIGHTS])
    assert parameter.ds_secondary_tensor.untyped_storage().nbytes() == 0
    states.reload([WEIGHTS])
    assert torch.equal(parameter.ds_secondary_tensor, torch.ones(2**18))
    parameter.ds_secondary_tensor = None  # as after an optimizer step
    states.offload([WEIGHTS])


def test_mistakes_are_named(engine: Any, cpu: Device) -> None:
    states = StateOffload(cpu, engine)
    with pytest.raises(ValueError, match=r"unknown tags \['kv_cache'\]; give some of \['weights', "):
        states.offload(["weights", "kv_cache"])
    states.offload([WEIGHTS])
    states.check_loaded(OPTIMIZER, task="a step")
    with pytest.raises(RuntimeError, match=r"a step needs weights on the device: call wake_up\(\['weights'\]\) first"):
        states.check_loaded(*TAGS, task="a step")
