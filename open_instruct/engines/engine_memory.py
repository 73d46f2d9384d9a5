"""Estimates how much memory the engines will need, from the model's configuration only."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import CPU_KV_CACHE_BYTES, Device
from open_instruct.device_memory import power_of_two

BLOCK_TOKENS = 16
"""Tokens of a block of the key-value cache: on GPU vLLM's default, on CPU a multiple of it."""
COPIES_ON_CPU = 2.6
"""Copies of the weights that an engine holds on CPU: vLLM packs the weights of linear layers, and during an update it holds old
and new weights. This number and the following ones are measured (`benchmarks/memory.py`)."""
COPIES_WITH_ADAPTERS = 1.5
"""The same where only adapters are sent, and the other weights are read from the model's files."""
COPIES_OF_TEACHER = 1.3
"""The same where no weights are sent. Measured with 164 M parameters."""
ALONE_BYTES = 10 * 2**20
"""Torch allocates separate memory for a tensor of at least this size, and puts smaller tensors together."""
_JOINED = re.compile(r"\b(?:[qkv]|gate|up)_proj\b")
PROGRAM_BYTES = 1750 * 2**20
"""Memory that an engine takes on CPU before it has a model: Python, torch, vLLM, and tensors of one step."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that one worker of an engine needs."""

    weights: int
    cache: int
    """0 where the GPUs are on other machines, because their size is then not known."""
    num_cached_tokens: int
    """Tokens whose keys and values the cache holds, of all sequences together."""
    program: int
    """Memory that the process takes without a model; 0 on GPU, where it depends on the driver."""
    asleep: int = 0
    """Main memory that the weights take while the worker sleeps and keeps them; 0 on CPU, where sleep moves no weights."""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.program


def teacher_memory(args: GRPOConfig, device: Device) -> EngineMemory | None:
    """Memory that each worker of the teacher's engines needs; None without a teacher."""
    if args.teacher_model_name_or_path is None:
        return None
    as_policy = replace(
        args,
        model_name_or_path=args.teacher_model_name_or_path,
        model_revision=args.teacher_model_revision,
        trust_remote_code=False,
        vllm_tensor_parallel_size=args.teacher_tensor_parallel_size,
    )
    return engine_memory(as_policy, device, copies_on_cpu=COPIES_OF_TEACHER)


def engine_memory(args: GRPOConfig, device: Device, *, copies_on_cpu: float | None = None) -> EngineMemory:
    """Memory that each worker of an engine needs, with `copies_on_cpu` copies of its weights. None: the copies that an engine
    needs to receive new weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision, trust_remote_code=args.trust_remote_code
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=device.torch_dtype, trust_remote_code=args.trust_remote_code
        )
    workers = args.vllm_tensor_parallel_size
    tensors = {name: parameter.nbytes // workers for name, parameter in model.named_parameters()}
    weights = sum(tensors.values())
    if device.kind == "cpu":
        adapters_alone = args.use_peft and device.weight_transport == "ray_object"
        weights = int((copies_on_cpu or (COPIES_WITH_ADAPTERS if adapters_alone else COPIES_ON_CPU)) * weights)
    if device.kind == "cpu":
        cache = CPU_KV_CACHE_BYTES
    else:
        cache = max(int(args.vllm_gpu_memory_utilization * (device.memory.total_bytes() or 0)) - weights, 0)
    token_bytes = cache_bytes_per_token(config.get_text_config(), device.torch_dtype.itemsize, workers)
    return EngineMemory(
        weights=weights,
        cache=cache,
        num_cached_tokens=cache // token_bytes // BLOCK_TOKENS * BLOCK_TOKENS,
        program=PROGRAM_BYTES if device.kind == "cpu" else 0,
        asleep=page_locked_bytes(tensors) if device.kind != "cpu" else 0,
    )


def page_locked_bytes(tensors: Mapping[str, int]) -> int:
    """Main memory that vLLM's sleep takes for weights, given their bytes by name. vLLM copies each weight to page-locked memory,
    which torch hands out in powers of two (`CachingHostAllocator`) and keeps. vLLM joins the projections of queries, keys and
    values, and of gate and up."""
    joined: Counter[str] = Counter()
    for name, num_bytes in tensors.items():
        joined[_JOINED.sub("", name)] += num_bytes
    return sum(power_of_two(num_bytes) if num_bytes >= ALONE_BYTES else num_bytes for num_bytes in joined.values())


def cache_bytes_per_token(config: Any, item: int, workers: int) -> int:
    """Bytes of one token's keys and values in all layers, on one of the workers of an engine."""
    if latent := getattr(
        config, "kv_lora_rank", None
    ):  # latent attention keeps one vector for all heads, on every worker
        return config.num_hidden_layers * (latent + config.qk_rope_head_dim) * item
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * max(heads // workers, 1) * head_size * item
