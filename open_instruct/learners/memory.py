"""How much memory a learner will need, from the model's configuration alone.

Weights are counted on torch's meta device, which holds no numbers. What a forward pass keeps for the backward pass is counted
there too: the model runs on a micro-batch of the largest size, and torch tells which tensors it would keep.
"""

from dataclasses import dataclass
from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.learners.cpu_norms import use_fewer_passes
from open_instruct.learners.lora import add_adapter

ATTENTION = "memory_of_attention"
"""Name under which Transformers knows the attention that computes nothing."""
FULL = 4
"""Bytes of a float32, which moments, masters and sums of gradients are."""
LOGIT_COPIES = 3
"""Logits, log-probs and gradients of one chunk."""
PROCESS_BYTES = 400 * 2**20
"""What a learner takes on CPU before it has a model: Python, torch, DeepSpeed, Ray. As measured (`benchmarks/memory.py`)."""
BUCKET_ELEMENTS = 5 * 10**8
"""Most gradients that DeepSpeed sends at once, out of a copy (`reduce_bucket_size`)."""
GATHERED_ELEMENTS = 10**9
"""Weights that ZeRO stage 3 holds whole at once (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes that one learner needs at most."""

    weights: int
    """At ZeRO stage 3 this learner's share (and that of `deepspeed_zpg`), and those that are gathered."""
    gradients: int
    """Their sum, and the copies that DeepSpeed sends."""
    optimizer: int
    """Moments, and the fp32 master weights where they are apart from the weights."""
    reference: int
    activations: int
    """What the forward pass of the largest micro-batch keeps for the backward pass, and the logits of one chunk."""
    program: int
    """What the process takes without a model; 0 on GPU, where it depends on the driver."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def learner_memory(args: GRPOConfig, device: Device) -> LearnerMemory:
    """What each learner of a run needs. Nothing is read but the model's configuration."""
    model = _on_meta(args, device)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    stage = args.deepspeed_stage if device.dtype == "float32" else max(args.deepspeed_stage, 2)
    shares_of_states = args.num_learners if stage >= 2 else 1
    shares_of_weights = args.num_learners if stage == 3 else 1
    item = device.torch_dtype.itemsize
    on_gpu = device.kind != "cpu"
    held = 0 if on_gpu and args.deepspeed_offload_param else item * num_weights // shares_of_weights
    second_share = item * num_weights // args.deepspeed_zpg if args.deepspeed_zpg > 1 else 0
    gathered = item * min(num_weights, GATHERED_ELEMENTS) if stage == 3 else 0
    has_masters = stage == 2 or item != FULL
    in_buckets = item * (1 if stage == 0 else 2)
    as_sent = FULL if item != FULL else 0
    has_own_reference = args.load_ref_policy and not args.use_peft
    return LearnerMemory(
        weights=held + second_share + gathered,
        gradients=FULL * num_trained // shares_of_states + (in_buckets + as_sent) * min(num_trained, BUCKET_ELEMENTS),
        optimizer=0
        if on_gpu and args.deepspeed_offload_optimizer
        else (2 * FULL + FULL * has_masters) * num_trained // shares_of_states,
        reference=held + second_share + gathered if has_own_reference else 0,
        activations=_activations(model, args, device),
        program=PROCESS_BYTES if device.kind == "cpu" else 0,
    )


def num_micro_batch_tokens(args: GRPOConfig) -> int:
    """Tokens of the largest micro-batch on one learner."""
    return -(-args.per_device_train_batch_size * args.pack_length // args.sequence_parallel_size)


def _on_meta(args: GRPOConfig, device: Device) -> Any:
    """The model that is trained, without memory."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _keep_inputs_and_output)
    trusted = args.trust_remote_code
    config = AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision, trust_remote_code=trusted
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=device.torch_dtype, attn_implementation=ATTENTION, trust_remote_code=trusted
        )
        if device.has_faster_layers:
            use_fewer_passes(model)
        if args.use_peft:
            add_adapter(model, args)
    return model.train()


def _activations(model: Any, args: GRPOConfig, device: Device) -> int:
    """Bytes of the largest micro-batch."""
    config = model.config.get_text_config()
    num_tokens = num_micro_batch_tokens(args)
    rows = max(args.per_device_train_batch_size, num_tokens // args.max_sequence_length, 1)
    kept = _kept_for_backward(model, rows, -(-num_tokens // rows))
    item = device.torch_dtype.itemsize
    if args.gradient_checkpointing:  # the input of each layer, and all of one layer
        num_layers = config.num_hidden_layers
        kept = kept // num_layers + num_layers * num_tokens * config.hidden_size * item
    of_head = num_tokens * config.hidden_size * item
    chunk = min(num_tokens * config.vocab_size, max(device.logits_at_once, config.vocab_size))
    return kept + of_head + LOGIT_COPIES * FULL * chunk


def _kept_for_backward(model: Any, rows: int, columns: int) -> int:
    """Bytes that a forward pass of the layers keeps, weights not counted."""
    weights = {id(parameter) for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if id(tensor) not in weights and id(base) not in weights:
            seen[id(base)] = base  # held, so that no other tensor gets its id
        return tensor

    ids = torch.zeros(rows, columns, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    del output
    return sum(tensor.nbytes for tensor in seen.values())


class _Attention(torch.autograd.Function):
    """Keeps what fused attention keeps: queries, keys, values and output."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output


def _keep_inputs_and_output(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None
