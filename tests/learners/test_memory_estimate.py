"""What `--dry_run` says about memory: counted by hand for a small model. `benchmarks/memory.py` compares it with real runs."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S, make_args
from model_families import family_config
from ranks import Rank, started_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from open_instruct.device import Device, current_device
from open_instruct.engines.engine_memory import cache_bytes_per_token, engine_memory
from open_instruct.learners import activations, deepspeed_setup, memory_estimate
from open_instruct.learners.activations import CannotCount
from open_instruct.learners.deepspeed_setup import engine_around
from open_instruct.learners.logprobs import chunked_log_probs
from open_instruct.learners.memory_estimate import STATES, LearnerMemory, MainMemory, learner_memory
from open_instruct.learners.models import build_engine
from open_instruct.learners.optimizer_step import torch_optimizer
from open_instruct.learners.state_offload import _tensors_in

CPU, GPU = Device("cpu", "float32", "sdpa"), Device("cuda", "bfloat16", "sdpa")


@pytest.fixture(scope="module")
def num_weights(tied_model: str) -> int:
    from transformers import AutoModelForCausalLM

    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tied_model).parameters())


def counted(device: Device, **options: Any) -> LearnerMemory:
    return learner_memory(make_args(**options), device)


def test_one_learner_in_float32(num_weights: int) -> None:
    said = counted(CPU, load_ref_policy=True)
    assert said.weights == said.reference == 4 * num_weights
    assert said.gradients == 2 * 4 * num_weights  # the gradients, and the copy that is sent
    assert said.optimizer == 8 * num_weights
    assert said.total == sum(num_bytes or 0 for num_bytes in said.parts.values())
    assert counted(CPU).reference == 0


def test_states_are_divided_among_learners(num_weights: int) -> None:
    two = counted(CPU, deepspeed_stage=2, num_learners_per_node=[2, 2])
    assert two.weights == 4 * num_weights
    assert two.optimizer == 12 * num_weights // 4
    assert two.gradients == 4 * num_weights // 4 + 8 * num_weights
    three = counted(CPU, deepspeed_stage=3, num_learners_per_node=[2, 2])
    assert three.weights == 4 * num_weights // 4 + 4 * num_weights  # its share, and what is gathered
    assert three.optimizer == 8 * num_weights // 4


def test_masters_in_16_bits(num_weights: int) -> None:
    said = counted(GPU)  # stage 0 runs as 2
    assert said.weights == 2 * num_weights
    assert said.optimizer == 12 * num_weights
    assert said.gradients == (4 + 2 * 2 + 4) * num_weights  # their sum, two buckets, and what is sent of one in float32
    assert said.program == 0


@pytest.mark.parametrize(("num_trained", "bucket"), [(20, 20), (10**9, 5 * 10**8)])
def test_buckets_are_no_larger_than_what_is_trained(
    monkeypatch: pytest.MonkeyPatch, num_trained: int, bucket: int
) -> None:
    import deepspeed

    given: list[dict[str, Any]] = []
    engine = SimpleNamespace(zero_optimization_stage=lambda: 0)
    monkeypatch.setattr(deepspeed, "initialize", lambda **what: (given.append(what["config"]), engine)[1:] * 4)
    monkeypatch.setattr(deepspeed_setup, "make_schedule", lambda args, optimizer: None)
    with torch.device("meta"):
        model = torch.nn.ParameterList([torch.empty(num_trained), torch.empty(7)])
    model[1].requires_grad_(False)
    engine_around(model, make_args(), CPU, world_size=2)
    assert not hasattr(engine, "enable_backward_allreduce")
    engine_around(model, make_args(), CPU, world_size=1)
    assert engine.enable_backward_allreduce is False  # there is nobody to add up with
    assert [config["zero_optimization"]["reduce_bucket_size"] for config in given] == [bucket] * 2


def test_what_is_kept_in_main_memory_takes_none_of_the_gpu(num_weights: int) -> None:
    options = {"deepspeed_stage": 3, "num_learners_per_node": [4]}
    plain = counted(GPU, **options)
    assert plain.in_main_memory == MainMemory()
    moments = counted(GPU, **options, deepspeed_offload_optimizer=True)
    share = num_weights // 4
    assert plain.optimizer > moments.optimizer == 0
    # Buckets, their two copies in float32, and the part of one that is added up.
    assert moments.gradients == (2 * 2 + 4 + 4) * num_weights + 4 * share
    assert moments.in_main_memory == MainMemory(optimizer=12 * share, gradients=(4 + 4) * share)
    weights = counted(GPU, **options, deepspeed_offload_param=True)
    assert plain.weights - weights.weights == 2 * share
    assert 2 * share <= weights.in_main_memory.total == weights.in_main_memory.weights < 4 * share  # a power of two
    assert counted(GPU, **options, deepspeed_zpg=2).weights - plain.weights == 2 * num_weights // 2


def test_stage_2_adds_gradients_up_on_the_gpu(num_weights: int) -> None:
    options = {"deepspeed_stage": 2, "num_learners_per_node": [4]}
    plain, offloaded = counted(GPU, **options), counted(GPU, **options, deepspeed_offload_optimizer=True)
    assert 0 <= offloaded.gradients - plain.gradients < 2 * num_weights  # a buffer for the largest parameter
    main, share = offloaded.in_main_memory, num_weights // 4
    assert (main.optimizer, main.gradients) == (12 * share, 4 * share)
    assert 2 * share < main.weights < 2 * share + 2 * num_weights


def test_main_memory_is_one_on_cpu() -> None:
    options = {"deepspeed_stage": 3, "deepspeed_offload_optimizer": True}
    on_gpu, on_cpu = (counted(Device(kind, "bfloat16", "sdpa"), **options) for kind in ("cuda", "cpu"))
    assert on_cpu.in_main_memory == MainMemory()
    for name in STATES:
        assert getattr(on_cpu, name) == getattr(on_gpu, name) + getattr(on_gpu.in_main_memory, name)


def test_a_learner_that_sleeps_keeps_its_state_in_main_memory(num_weights: int) -> None:
    options = {"colocate": True, "load_ref_policy": True}
    assert counted(GPU, **options).in_main_memory.asleep == (2 + 2 + 12) * num_weights
    assert counted(GPU, **options, streaming=True).in_main_memory.asleep == (2 + 2 + 12 + 4) * num_weights
    assert counted(GPU, **options, deepspeed_stage=3).in_main_memory.asleep == (2 + 2 + 12 + 4) * num_weights
    offloaded = counted(GPU, **options, deepspeed_stage=3, deepspeed_offload_optimizer=True).in_main_memory
    assert offloaded.asleep == (2 + 2) * num_weights
    assert counted(CPU, **options).in_main_memory == MainMemory()


def test_a_moving_reference_in_16_bits_has_a_copy_in_float32(num_weights: int) -> None:
    options = {"load_ref_policy": True, "ref_policy_update_freq": 2, "num_learners_per_node": [2]}
    assert counted(GPU, **options).in_main_memory == MainMemory(reference=4 * num_weights)
    assert counted(GPU, **options, deepspeed_stage=3).in_main_memory.reference == 4 * num_weights // 2
    assert counted(Device("cuda", "float32", "sdpa"), **options).in_main_memory == MainMemory()


def test_engines_get_all_weights_or_adapters_alone(num_weights: int) -> None:
    assert counted(CPU).update == 4 * num_weights
    assert counted(CPU, use_peft=True, lora_r=2).update < 0.2 * 4 * num_weights
    through_gloo = Device("cpu", "float32", "sdpa", chosen_transport="gloo")
    assert counted(through_gloo, use_peft=True, lora_r=2).update > 4 * num_weights


def test_an_adapter_takes_little_and_its_reference_nothing(num_weights: int) -> None:
    said = counted(CPU, use_peft=True, lora_r=2, load_ref_policy=True)
    assert said.reference == 0
    assert 4 * num_weights < said.weights < 1.1 * 4 * num_weights
    assert said.optimizer < 0.1 * 8 * num_weights


def test_other_learners_need_gradients_in_float32_once_more(num_weights: int) -> None:
    """DeepSpeed puts the bucket together before the learners add it up."""
    alone, two = (counted(GPU, deepspeed_stage=3, num_learners_per_node=[number]) for number in (1, 2))
    assert alone.gradients == (4 + 2 * 2 + 4) * num_weights
    assert two.gradients == 4 * (num_weights // 2) + (2 * 2 + 4 + 4) * num_weights
    in_float32 = counted(CPU, deepspeed_stage=3, num_learners_per_node=[2])
    assert in_float32.gradients == 4 * (num_weights // 2) + 2 * 4 * num_weights


@pytest.mark.parametrize(("num_learners", "copies"), [(1, 4 + 2), (2, 4 + 4 + 2)])
def test_the_head_s_gradient_counts_where_it_is_larger_than_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, num_weights: int, num_learners: int, copies: int
) -> None:
    """As with a head of 622 million weights (8B), and buckets of 500 million. The sum in float32 and a product in 16 bits take 6
    bytes for each weight of the head."""
    head = 300 * 64  # the tiny model's words and width
    model = memory_estimate.model_on_meta(make_args(), GPU)
    assert activations.head_gradient_bytes(model) == (4 + 2) * model.get_output_embeddings().weight.numel()
    monkeypatch.setattr(memory_estimate, "head_gradient_bytes", lambda _: (4 + 2) * head)
    for bucket in (head // 10, head * 10):
        monkeypatch.setattr(memory_estimate, "BUCKET_ELEMENTS", bucket)
        said = counted(GPU, deepspeed_stage=3, num_learners_per_node=[num_learners])
        sent = min(bucket, num_weights)
        expected = 2 * sent + max(copies * sent, 6 * head)
        assert said.gradients == 4 * (num_weights // num_learners) + expected


def test_a_head_that_is_not_trained_has_no_gradient() -> None:
    model = memory_estimate.model_on_meta(make_args(use_peft=True, lora_r=2), GPU)
    assert activations.head_gradient_bytes(model) == 0


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that exist at once, apart from those that existed before."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self._held = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._held:
                self._held[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self._held.pop, key, None)
                self.peak = max(self.peak, sum(self._held.values()))
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_s_gradient_takes_what_is_counted(dtype: torch.dtype) -> None:
    num_words, width, chunk = 4096, 256, 4096
    hidden = torch.randn(8, width, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(width, num_words, bias=False, dtype=dtype)
    logprobs, _ = chunked_log_probs(hidden, head.weight, torch.randint(0, num_words, (8, 1)), chunk_elements=chunk)
    with _Live(hidden, head.weight) as live:
        logprobs.sum().backward()
    counted_bytes = activations.head_gradient_bytes(SimpleNamespace(get_output_embeddings=lambda: head))
    chunk_bytes = activations.LOGIT_COPIES * activations.FLOAT32_BYTES * chunk
    assert counted_bytes < live.peak < counted_bytes + 2 * chunk_bytes


def test_the_first_learner_stacks_experts_while_it_loads(num_weights: int, tmp_path: Path) -> None:
    config = family_config("qwen3_moe")
    config.save_pretrained(tmp_path)
    experts = config.num_hidden_layers * config.num_experts * 3 * config.moe_intermediate_size * config.hidden_size
    options = {"model_name_or_path": str(tmp_path), "num_learners_per_node": [8]}
    assert counted(GPU, **options, deepspeed_stage=3).stacked == 2 * experts
    assert counted(GPU, **options, deepspeed_stage=3, use_peft=True).stacked == 2 * experts
    assert counted(GPU, **options, deepspeed_stage=2).stacked == 0
    assert counted(GPU, deepspeed_stage=3, num_learners_per_node=[8]).stacked == 0


def test_activations_that_cannot_be_counted_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise CannotCount("it asks for numbers")

    before = counted(CPU)
    monkeypatch.setattr(memory_estimate, "activation_bytes", refuse)
    said = counted(CPU)
    assert said.activations is None
    assert said.why_unknown == "it asks for numbers"
    assert before.activations is not None
    assert said.total == before.total - before.activations


def test_activations_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    def num_bytes_kept(**options: Any) -> int:
        return counted(CPU, response_length=32, **options).activations or 0

    few, many = (num_bytes_kept(pack_length=length) for length in (512, 2048))
    assert 3 < many / few < 5
    assert 0 < num_bytes_kept(pack_length=2048, gradient_checkpointing=True) < 0.75 * many
    shared = num_bytes_kept(pack_length=2048, sequence_parallel_size=2, num_learners_per_node=[2])
    assert shared == pytest.approx(many / 2, rel=0.1)


def test_the_cache_of_an_engine(tied_model: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tied_model)
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cache_bytes_per_token(config, 4, 1) == of_token
    assert cache_bytes_per_token(config, 4, 2) == of_token // 2
    said = engine_memory(make_args(), CPU)
    assert said.num_cached_tokens == said.cache // of_token // 16 * 16


def test_an_engine_that_gets_adapters_alone_holds_fewer_copies() -> None:
    options = {"use_peft": True, "lora_r": 2}
    all_weights, adapters = (engine_memory(make_args(**some), CPU).weights for some in ({}, options))
    merged = engine_memory(make_args(**options), Device("cpu", "float32", "sdpa", chosen_transport="gloo")).weights
    assert adapters < 0.6 * all_weights
    assert merged == all_weights


# --- against what DeepSpeed holds ---


@pytest.fixture(scope="module")
def rank(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started_ranks(ray_session, 1, tmp_path_factory.mktemp("rank"), __name__) as [one]:
        yield one


def held_with_offload(rank: Rank, stage: int, dtype: str) -> dict[str, int]:
    """Bytes of what DeepSpeed would keep in main memory beside a GPU, while it adds gradients up and makes a step."""
    args = make_args(deepspeed_stage=stage, deepspeed_offload_optimizer=True)
    engine = build_engine(args, current_device(kind="cpu", dtype=dtype), world_size=rank.world_size)
    tokens = torch.randint(3, 60, (2, 16))
    for is_last in (False, True):
        engine.set_gradient_accumulation_boundary(is_last)
        logprobs = engine(tokens, torch.arange(16).expand_as(tokens), 1.0)[0]
        engine.backward(logprobs.sum(), scale_wrt_gas=False)
    zero = engine.optimizer
    masters = list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)
    names = "grad_partitions_flat_buffer", "accumulated_grads_in_cpu"
    gradients = [master.grad for master in masters] + [getattr(zero, name, None) for name in names]
    names = "param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload"
    found = {"gradients": num_bytes(gradients), "weights": num_bytes([getattr(zero, name, None) for name in names])}
    engine.step()
    moments = [dict(state) for state in torch_optimizer(engine).state.values()]
    return {**found, "optimizer": num_bytes([masters, moments])}


def num_bytes(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in _tensors_in(tensors)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stage", [2, 3])
def test_main_memory_is_what_deepspeed_holds_there(ray_session: Any, rank: Any, stage: int, dtype: str) -> None:
    held = ray_session.get(rank.call.remote(held_with_offload, stage, dtype), timeout=TIMEOUT_S)
    options = {"deepspeed_stage": stage, "deepspeed_offload_optimizer": True}
    said = counted(Device("cuda", dtype, "sdpa"), **options).in_main_memory
    assert held == {name: pytest.approx(getattr(said, name), rel=0.01, abs=4096) for name in held}
