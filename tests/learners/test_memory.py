"""What `--dry_run` says about memory: counted by hand for a small model. `benchmarks/memory.py` compares it with real runs."""

from typing import Any

import pytest
import torch
from conftest import make_args

from open_instruct.device import Device
from open_instruct.engines.engine_memory import cache_bytes_per_token, engine_memory
from open_instruct.learners import memory, models
from open_instruct.learners.cpu_norms import use_fewer_passes
from open_instruct.learners.memory import LearnerMemory, learner_memory
from open_instruct.learners.models import engine_around

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
    assert said.total == sum(vars(said).values())
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
    monkeypatch.setattr(deepspeed, "initialize", lambda **what: (given.append(what["config"]), None)[1:] * 4)
    monkeypatch.setattr(models, "_make_scheduler", lambda args, optimizer: None)
    with torch.device("meta"):
        model = torch.nn.ParameterList([torch.empty(num_trained), torch.empty(7)])
    model[1].requires_grad_(False)
    engine_around(model, make_args(), CPU, world_size=1)
    assert given[0]["zero_optimization"]["reduce_bucket_size"] == bucket


def test_what_is_kept_in_main_memory_takes_none_of_the_gpu(num_weights: int) -> None:
    options = {"deepspeed_stage": 3, "num_learners_per_node": [4]}
    plain = counted(GPU, **options)
    moments = counted(GPU, **options, deepspeed_offload_optimizer=True)
    assert plain.optimizer > moments.optimizer == 0
    weights = counted(GPU, **options, deepspeed_offload_param=True)
    assert plain.weights - weights.weights == 2 * num_weights // 4
    assert counted(GPU, **options, deepspeed_zpg=2).weights - plain.weights == 2 * num_weights // 2
    on_cpu = counted(CPU, **options, deepspeed_offload_optimizer=True, deepspeed_offload_param=True)
    assert on_cpu == counted(CPU, **options)


def test_an_adapter_takes_little_and_its_reference_nothing(num_weights: int) -> None:
    said = counted(CPU, use_peft=True, lora_r=2, load_ref_policy=True)
    assert said.reference == 0
    assert 4 * num_weights < said.weights < 1.1 * 4 * num_weights
    assert said.optimizer < 0.1 * 8 * num_weights


def test_activations_are_what_torch_keeps(tied_model: str) -> None:
    """Against a real forward pass on CPU, whose attention keeps what fused attention keeps."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32, attn_implementation="sdpa")
    use_fewer_passes(model)  # as learners do
    storages: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.ones(4, 128, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=ids, position_ids=torch.arange(128)[None].expand(4, -1), use_cache=False)
    on_meta = memory._on_meta(make_args(model_name_or_path=tied_model), CPU)
    assert memory._kept_for_backward(on_meta, 4, 128) == pytest.approx(sum(storages.values()), rel=0.05)
    del output


def test_activations_grow_with_tokens_and_shrink_with_checkpointing() -> None:
    few, many = (counted(CPU, pack_length=length, response_length=32).activations for length in (512, 2048))
    assert 3 < many / few < 5
    assert counted(CPU, pack_length=2048, gradient_checkpointing=True).activations < 0.75 * many
    shared = counted(CPU, pack_length=2048, sequence_parallel_size=2, num_learners_per_node=[2])
    assert shared.activations == pytest.approx(many / 2, rel=0.1)


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
