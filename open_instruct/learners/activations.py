"""Counts the bytes that a learner keeps from the forward pass of a micro-batch for the backward pass, without using memory: the
model runs on torch's meta device, which holds no numbers, and torch reports which tensors it would keep.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.learners.cpu_norms import use_fewer_passes
from open_instruct.learners.lora import add_adapter

ATTENTION = "memory_of_attention"
"""Name under which Transformers knows an attention that only keeps tensors and computes nothing."""
FLOAT32_BYTES = 4
LOGIT_COPIES = 3
"""Tensors of the size of one chunk's logits: logits, log-probs and gradients."""


class CannotCount(RuntimeError):
    """The model does not run without numbers; the message says why."""


def model_on_meta(args: GRPOConfig, device: Device) -> Any:
    """The model that is trained, without memory for its weights. Like a learner's model it has no dropout."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _keep_inputs_and_output)
    trusted = args.trust_remote_code
    config = AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision, trust_remote_code=trusted
    )
    options = {"dtype": device.torch_dtype, "trust_remote_code": trusted}
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, **options)
        except (KeyError, ValueError):  # the model's layers choose their attention from their own table
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
        if device.has_faster_layers:
            use_fewer_passes(model)
        if args.use_peft:
            add_adapter(model, args)
            _as_dtype_of_model(model, device.torch_dtype)
    return model.eval()


def _as_dtype_of_model(model: Any, dtype: torch.dtype) -> None:
    """Give adapters the dtype of the layers that they belong to. peft 0.21 does so only where tensors hold numbers."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def activation_bytes(model: Any, args: GRPOConfig, device: Device) -> int:
    """Bytes of the largest micro-batch: the tensors kept for the backward pass, and the logits of one chunk.

    Args:
        model: from `model_on_meta`.

    Raises:
        CannotCount: `model` does not run on the meta device, or has its own attention.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != ATTENTION:
        raise CannotCount(f"{type(model).__name__} has attention of its own")
    num_tokens = num_micro_batch_tokens(args)
    rows = max(args.per_device_train_batch_size, num_tokens // args.max_sequence_length, 1)
    num_bytes = kept_for_backward(model, rows, -(-num_tokens // rows))
    item = device.torch_dtype.itemsize
    if args.gradient_checkpointing:  # the input of each layer, and all of one layer
        num_layers = config.num_hidden_layers
        num_bytes = num_bytes // num_layers + num_layers * num_tokens * config.hidden_size * item
    head_bytes = num_tokens * config.hidden_size * item
    chunk = min(num_tokens * config.vocab_size, max(device.logits_at_once, config.vocab_size))
    return num_bytes + head_bytes + LOGIT_COPIES * FLOAT32_BYTES * chunk


def head_gradient_bytes(model: Any) -> int:
    """Bytes of the head's gradient while `logprobs._ChunkedLogProbs` computes it: their sum in float32, and at the same time the
    product of one chunk, then the gradient, in the dtype of the weights. All kept activations are still there. 0 if the head is
    not trained."""
    weight = model.get_output_embeddings().weight
    return (FLOAT32_BYTES + weight.dtype.itemsize) * weight.numel() if weight.requires_grad else 0


def num_micro_batch_tokens(args: GRPOConfig) -> int:
    """Tokens of the largest micro-batch on one learner."""
    return -(-args.per_device_train_batch_size * args.pack_length // args.sequence_parallel_size)


def kept_for_backward(model: Any, rows: int, columns: int) -> int:
    """Bytes that a forward pass of the layers keeps, without the weights. Raises CannotCount."""
    weights = {id(parameter) for parameter in model.parameters()}
    tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if id(tensor) not in weights and id(base) not in weights:
            tensors[id(base)] = base  # held, so that no other tensor gets its id
        return tensor

    ids = torch.zeros(rows, columns, dtype=torch.int64, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _GroupedMM(), _no_autocast():
            output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    except Exception as error:  # a model may fail in any way when it needs numbers
        [cause, *_] = [*str(error).splitlines(), type(error).__name__]
        raise CannotCount(f"{type(model).__name__} does not run without numbers ({cause})") from error
    del output
    return sum(tensor.nbytes for tensor in tensors.values())


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


# --- what torch 2.13 does not do on its meta device: mixtures of experts fail without it (`test_every_family_is_counted`) ---


class _GroupedMM(TorchFunctionMode):
    """Replaces the product of tokens and experts, because its meta kernel takes only bfloat16. Transformers 5.19 computes this
    product in `grouped_mm_experts_forward`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm:
            return _GroupedProduct.apply(*args[:2])
        return func(*args, **(kwargs or {}))


class _GroupedProduct(torch.autograd.Function):
    """Keeps what torch's grouped product keeps: each factor whose value the gradient of the other factor needs."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        wants_tokens, wants_experts = ctx.needs_input_grad
        ctx.save_for_backward(tokens if wants_experts else None, experts if wants_tokens else None)
        return tokens.new_empty(tokens.shape[0], experts.shape[-1])


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Make `torch.autocast` do nothing, because it does not support the meta device and is never on here. peft 0.21 switches it
    off where it adds adapters to experts."""
    before = torch.autocast
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = before  # type: ignore[misc]
