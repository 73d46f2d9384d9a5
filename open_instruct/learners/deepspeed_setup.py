"""Sets up DeepSpeed for a learner's model: optimizer, ZeRO, gradient clipping."""

from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.learners.learning_rate import make_schedule
from open_instruct.learners.memory_estimate import BUCKET_ELEMENTS


def engine_around(model: torch.nn.Module, args: GRPOConfig, device: Device, *, world_size: int) -> Any:
    """A DeepSpeed engine that trains the parameters of `model` that have a gradient."""
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = deepspeed_config(args, device, world_size=world_size)
    # DeepSpeed makes buckets of full size (2 GB of them in bfloat16) even for an adapter of a few million weights.
    num_trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    config["zero_optimization"]["reduce_bucket_size"] = min(BUCKET_ELEMENTS, num_trained)
    optimizer = torch.optim.AdamW(
        trained,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        fused=True,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=make_schedule(args, optimizer)
    )
    if world_size == 1 and engine.zero_optimization_stage() == 0:
        engine.enable_backward_allreduce = False  # a sum over one rank, for which all gradients would be copied twice
    return engine


def deepspeed_config(args: GRPOConfig, device: Device, *, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration. The number of micro-batches changes from step to step, so the learner itself marks the
    boundaries of steps."""
    config = _config(args, device, world_size=world_size)
    if device.dtype != "float32":
        # By default, gradients of many micro-batches and ranks are added up in bf16, where 1 + 1/256 is 1.
        config["communication_data_type"] = "fp32"
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _offload(args: GRPOConfig) -> dict[str, Any]:
    """The parts of ZeRO's configuration that save device memory or traffic between nodes."""
    parts: dict[str, Any] = {}
    if args.deepspeed_offload_optimizer:
        parts["offload_optimizer"] = {"device": "cpu"}
    if args.deepspeed_offload_param:
        parts["offload_param"] = {"device": "cpu"}
    if args.deepspeed_zpg > 1:
        parts["zero_hpz_partition_size"] = args.deepspeed_zpg
    return parts


def _zero_stage(args: GRPOConfig, device: Device) -> int:
    """The ZeRO stage that DeepSpeed runs at: at least 2, except in float32.

    In bf16 at stage 0, DeepSpeed 0.19.8 cannot add up gradients in fp32. Stage 2 can, and with one learner it divides nothing.
    The optimizer of stage 0 in bf16 also makes a step on zeros when it is built, so Adam's first real step is too short.
    """
    return args.deepspeed_stage if device.dtype == "float32" else max(args.deepspeed_stage, 2)


def _config(args: GRPOConfig, device: Device, *, world_size: int) -> dict[str, Any]:
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": device.dtype == "bfloat16"},  # by default bf16 on CPU, which is many times slower
        "fp16": {"enabled": device.dtype == "float16"},
        "zero_optimization": {
            "stage": _zero_stage(args, device),
            "overlap_comm": device.has_streams,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": False,
            **_offload(args),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
