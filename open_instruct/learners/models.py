"""Loads and prepares the models of a learner: the policy and the reference."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_support import attention_that_fits
from open_instruct.device import Device
from open_instruct.learners.attention import FLASH
from open_instruct.learners.cpu_linear import use_onednn
from open_instruct.learners.cpu_norms import use_fewer_passes
from open_instruct.learners.deepspeed_setup import deepspeed_config, engine_around
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.lora import add_adapter, leave_frozen_out_of_checkpoints
from open_instruct.learners.sequence_parallel import ATTENTION, SequenceParallel
from open_instruct.learners.stage3_loading import experts_on_rank_0

KINDS_OF_BATCHES = 64
"""Most variants of a layer that torch compiles: with and without gradient, one row or several, and the like. Torch's own limit is
8; it does not compile further variants."""


def join_sequence_parallel(args: GRPOConfig, device: Device, *, rank: int, world_size: int) -> SequenceParallel | None:
    """This rank's place in its sequence-parallel group; None without sequence parallelism. Every rank calls it."""
    from transformers import AutoConfig

    if args.sequence_parallel_size == 1:
        return None
    config = AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision, trust_remote_code=args.trust_remote_code
    ).get_text_config()
    return SequenceParallel(
        size=args.sequence_parallel_size,
        rank=rank,
        world_size=world_size,
        attn_implementation=device.attn_implementation,
        config=config,
        timeout=timedelta(minutes=args.backend_timeout),
    )


def build_engine(
    args: GRPOConfig, device: Device, *, world_size: int, sequence_parallel: SequenceParallel | None = None
) -> Any:
    """The DeepSpeed engine of the model that is trained, with its optimizer and its learning rate schedule."""
    config = deepspeed_config(args, device, world_size=world_size)
    model = _load_model(args, device, config, sequence_parallel)
    train_mode(model)
    if args.use_peft:
        add_adapter(model.model, args)
    engine = engine_around(model, args, device, world_size=world_size)
    if args.use_peft:
        leave_frozen_out_of_checkpoints(engine)
    return engine


def build_reference(
    args: GRPOConfig, device: Device, *, world_size: int, sequence_parallel: SequenceParallel | None = None
) -> torch.nn.Module:
    """The reference model of a run without adapters. At stage 3 its weights are divided among the ranks."""
    import deepspeed

    # Without the second share of the weights: only a backward pass needs it, and DeepSpeed makes the group for it only once.
    config = deepspeed_config(replace(args, deepspeed_zpg=1), device, world_size=world_size)
    model = _load_model(args, device, config, sequence_parallel).eval().requires_grad_(False)
    if args.deepspeed_stage != 3:
        return model.to(device.learner_device)
    ref_engine, *_ = deepspeed.initialize(model=model, config=config)
    return ref_engine


def _load_model(
    args: GRPOConfig, device: Device, config: dict[str, Any], sequence_parallel: SequenceParallel | None
) -> LogProbModel:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    # Transformers' own flash attention needs a package; `LogProbModel` replaces it by ours.
    plain = "sdpa" if device.attn_implementation == FLASH else device.attn_implementation
    # As long as this object lives, Transformers divides the weights among the ranks as they are read.
    zero3 = HfDeepSpeedConfig(config) if args.deepspeed_stage == 3 else None
    with nullcontext() if zero3 is None else experts_on_rank_0(torch.distributed.get_rank()):
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision,
            trust_remote_code=args.trust_remote_code,
            dtype=device.torch_dtype,
            attn_implementation=ATTENTION if sequence_parallel else plain,
        )
    del zero3
    _, reason = attention_that_fits(model.config, device.attn_implementation, trusted=args.trust_remote_code)
    if reason:  # `grpo_fast.settled` prevents it; a program that makes its own learners may not have called it
        raise ValueError(f"--attn_implementation {device.attn_implementation}: {reason}.")
    _own_memory(model)
    _drop_nothing(model)
    if args.compile_model:
        compile_layers(model)
    elif device.has_faster_layers:  # torch cannot compile these layers
        use_onednn(model)
        use_fewer_passes(model)
    if args.gradient_checkpointing:
        compute_again(model, args)
    return LogProbModel(
        model,
        chunk_elements=device.logits_at_once,
        attn_implementation=None if sequence_parallel else device.attn_implementation,
        sequence_parallel=sequence_parallel,
    )


def train_mode(model: torch.nn.Module) -> None:
    """Switch to training mode, as gradient checkpointing requires. Leave out modules of a mixture of experts that would then add
    noise or draw experts at random (`phimoe`), because the engine does neither, and the two policies would differ."""
    model.train()
    for module in model.modules():
        if any("jitter" in name for name in vars(module)):
            module.training = False


def compute_again(model: Any, args: GRPOConfig) -> None:
    """Switch on gradient checkpointing. A compiled layer may be recompiled between its two forward passes and then keep other
    tensors; only reentrant checkpointing allows that. It needs an input with a gradient; a frozen embedding's output has none."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": args.compile_model})
    if args.compile_model and args.use_peft:
        model.enable_input_require_grads()


def compile_layers(model: torch.nn.Module) -> None:
    """Make torch compile each layer when it is first called; equal layers share the result. Attention is not compiled
    (`attention.register`), so batches may have any shape and any sequences in their rows."""
    torch._dynamo.config.recompile_limit = KINDS_OF_BATCHES
    names: Any = model._no_split_modules
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True)


def _drop_nothing(model: torch.nn.Module) -> None:
    """Switch dropout off. The engine has no dropout, so with dropout the learner's policy would differ from the engine's."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)


def _own_memory(model: torch.nn.Module) -> None:
    """Copy the weights out of the file that they were read from.

    On CPU, safetensors returns a private mapping of the file. When a process writes the file again, the kernel drops even pages
    that training has changed, and the model silently becomes the model on disk.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel():
                tensor.data = tensor.data.clone()


def hf_model(engine: Any) -> Any:
    """The model as Transformers made it."""
    return engine.module.model
