"""Estimates how much memory a learner will need, from the model's configuration only.

Weights are counted on torch's meta device, which holds no numbers, and so are the tensors that a forward pass keeps
(`activations.py`). The places of the states follow DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `stage_1_and_2.py`) and this
project's own copies.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.device_memory import power_of_two
from open_instruct.learners.activations import CannotCount, activation_bytes, head_gradient_bytes, model_on_meta
from open_instruct.learners.checkpoint_format import CheckpointFormat, stacked_elements
from open_instruct.learners.lora import Adapters
from open_instruct.weight_transports import RAY_OBJECT

FULL = 4
"""Bytes of a float32, the dtype of moments, master weights and sums of gradients."""
PROCESS_BYTES = 400 * 2**20
"""Memory that a learner takes on CPU before it has a model: Python, torch, DeepSpeed, Ray. Measured (`benchmarks/memory.py`)."""
BUCKET_ELEMENTS = 5 * 10**8
"""Most gradients that DeepSpeed sends at once, from a copy (`reduce_bucket_size`)."""
GATHERED_ELEMENTS = 10**9
"""Most weights that ZeRO stage 3 holds whole at once (`stage3_max_live_parameters`)."""
STATES = "weights", "gradients", "optimizer", "reference"
"""The states that are held on the device or in main memory."""


@dataclass(frozen=True)
class MainMemory:
    """Bytes of main memory that a learner on a GPU needs in addition to its program."""

    weights: int = 0
    """With `deepspeed_offload_param` this learner's share, page-locked; with `deepspeed_offload_optimizer` at stage 2, the new
    weights on their way to the GPU."""
    gradients: int = 0
    """With `deepspeed_offload_optimizer`: the gradients that the optimizer reads, and at stage 3 their sum too."""
    optimizer: int = 0
    """With `deepspeed_offload_optimizer`: moments and master weights."""
    reference: int = 0
    """With `deepspeed_offload_param` the reference's weights; with `ref_policy_update_freq` in 16 bits their copy in float32."""
    asleep: int = 0
    """With `colocate`: page-locked buffers for the states that leave the GPU. They are kept for the next time."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes that one learner needs at most on its device, which on CPU is main memory."""

    weights: int
    """At ZeRO stage 3 this learner's share (and its share of `deepspeed_zpg`), and the weights that are gathered."""
    gradients: int
    """The sum of gradients, and the larger of the copies that DeepSpeed sends and the gradient of the head in float32, which is
    computed before anything is sent."""
    optimizer: int
    """Moments, and the fp32 master weights where they are separate from the weights."""
    reference: int
    activations: int | None
    """Tensors that the forward pass of the largest micro-batch keeps for the backward pass, and the logits of one chunk. None if
    they could not be counted."""
    program: int
    """Memory that the process takes without a model; 0 on GPU, where it depends on the driver."""
    in_main_memory: MainMemory = field(default_factory=MainMemory)
    """What a learner on a GPU needs in main memory in addition; nothing on CPU."""
    why_unknown: str = ""
    """Why `activations` is None."""
    stacked: int = 0
    """Bytes of main memory that only the first learner takes, while it loads a mixture of experts at stage 3: the experts, which
    the checkpoint holds one by one (`stage3_loading.py`)."""
    update: int = 0
    """The weights that engines get in an update: all, or only adapters. Not in the total, because they are in shared memory."""

    @property
    def parts(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in (*STATES, "activations", "program")}

    @property
    def total(self) -> int:
        """The sum of the parts that are known."""
        return sum(num_bytes or 0 for num_bytes in self.parts.values())


def learner_memory(args: GRPOConfig, device: Device) -> LearnerMemory:
    """Memory that each learner of a run needs. Only the model's configuration is read."""
    model = model_on_meta(args, device)
    states = _States(args, device, model)
    activations, why_unknown = None, ""
    try:
        activations = activation_bytes(model, args, device)
    except CannotCount as error:
        why_unknown = str(error)
    on_device = LearnerMemory(
        weights=states.held_on_device + states.passing_through,
        gradients=states.gradients_on_device + states.buckets,
        optimizer=0 if args.deepspeed_offload_optimizer else states.optimizer,
        reference=states.has_own_reference * (states.held_on_device + states.gathered),
        activations=activations,
        program=PROCESS_BYTES if device.kind == "cpu" else 0,
        why_unknown=why_unknown,
        stacked=states.item * stacked_elements(model) if states.stage == 3 else 0,
        update=states.item * (states.num_trained if _sends_adapters_alone(model, args, device) else states.num_weights),
    )
    main = MainMemory(
        weights=states.weights_in_main_memory,
        gradients=states.gradients_in_main_memory,
        optimizer=states.optimizer if args.deepspeed_offload_optimizer else 0,
        reference=states.has_own_reference * (states.held_off_device + states.exact_reference),
        asleep=states.asleep if device.kind != "cpu" and args.colocate else 0,
    )
    if device.kind == "cpu":  # both are the same memory
        return replace(on_device, **{name: getattr(on_device, name) + getattr(main, name) for name in STATES})
    return replace(on_device, in_main_memory=main)


class _States:
    """Bytes of the parts of one learner's state, on the device and in main memory."""

    def __init__(self, args: GRPOConfig, device: Device, model: Any) -> None:
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        self.num_weights, self.num_trained = sum(parameter.numel() for parameter in model.parameters()), sum(trained)
        self.largest = max(trained)
        self.head_gradient = head_gradient_bytes(model)
        self.args, self.item = args, device.torch_dtype.itemsize
        self.stage = args.deepspeed_stage if self.item == FULL else max(args.deepspeed_stage, 2)
        self.shares_of_weights = args.num_learners if self.stage == 3 else 1
        self.trained_here = self.num_trained // (args.num_learners if self.stage >= 2 else 1)
        self.offloads = args.deepspeed_offload_optimizer
        self.has_own_reference = args.load_ref_policy and not args.use_peft

    @property
    def held(self) -> int:
        return self.item * self.num_weights // self.shares_of_weights

    @property
    def held_on_device(self) -> int:
        return 0 if self.args.deepspeed_offload_param else self.held

    @property
    def held_off_device(self) -> int:
        return self.held if self.args.deepspeed_offload_param else 0

    @property
    def passing_through(self) -> int:
        """Weights of other learners that stage 3 holds: the secondary share, and the gathered weights."""
        zpg = self.args.deepspeed_zpg
        return self.gathered + (self.item * self.num_weights // zpg if zpg > 1 else 0)

    @property
    def gathered(self) -> int:
        return self.item * min(self.num_weights, GATHERED_ELEMENTS) if self.stage == 3 else 0

    @property
    def weights_in_main_memory(self) -> int:
        """Torch hands out page-locked memory in powers of two (`CachingHostAllocator`). At stage 2 new weights, and the gradient
        of one parameter, pass through buffers."""
        if self.args.deepspeed_offload_param:
            frozen = self.item * (self.num_weights - self.num_trained) // self.shares_of_weights
            return frozen + power_of_two(self.item * self.trained_here)
        return self.item * (self.trained_here + self.largest) if self.offloads and self.stage == 2 else 0

    @property
    def optimizer(self) -> int:
        has_masters = self.stage == 2 or self.item != FULL or self.offloads
        return (2 * FULL + FULL * has_masters) * self.trained_here

    @property
    def sum_is_on_device(self) -> bool:
        """Whether gradients are added up on the device. With offload only at stage 2 in 16 bits."""
        return not self.offloads or (self.stage == 2 and self.item != FULL)

    @property
    def gradients_on_device(self) -> int:
        parameter_bytes = self.item * self.largest if self.offloads and self.stage == 2 else 0
        return FULL * self.trained_here * self.sum_is_on_device + parameter_bytes

    @property
    def gradients_in_main_memory(self) -> int:
        """The gradients of the master weights, and the sum of gradients unless it is on the device."""
        return FULL * self.trained_here * (2 - self.sum_is_on_device) if self.offloads else 0

    @property
    def buckets(self) -> int:
        """Gradient copies for sending, or in their place the head's gradient, which is computed before. With offload at stage 3,
        the part of a bucket that is added up returns to the device."""
        item = 0 if self.stage == 0 else self.item
        bucket = min(self.num_trained, BUCKET_ELEMENTS)
        comes_back = FULL * bucket // self.args.num_learners if self.offloads and self.stage == 3 else 0
        return item * bucket + max((self.item + self.in_float32) * bucket, self.head_gradient) + comes_back

    @property
    def in_float32(self) -> int:
        """Bytes in float32 of each weight of a bucket that is sent in 16-bit training: the gradients, which at stage 3 are also
        put together if there are other learners (`reduce_scatter_coalesced`)."""
        if self.item == FULL:
            return 0
        return 2 * FULL if self.stage == 3 and self.args.num_learners > 1 else FULL

    @property
    def exact_reference(self) -> int:
        """The float32 copy that `MovingReference` holds."""
        moves = self.args.ref_policy_update_freq is not None and self.item != FULL
        return FULL * self.num_weights // self.shares_of_weights if moves else 0

    @property
    def asleep(self) -> int:
        """The states that `StateOffload` moves. Between steps, sums of gradients exist only at stage 3; within a step that
        streams they exist at every stage."""
        has_sum = self.sum_is_on_device and (self.stage == 3 or self.args.streaming)
        optimizer = 0 if self.offloads else self.optimizer
        return self.held_on_device * (1 + self.has_own_reference) + optimizer + FULL * self.trained_here * has_sum


def _sends_adapters_alone(model: Any, args: GRPOConfig, device: Device) -> bool:
    if not args.use_peft or device.weight_transport != RAY_OBJECT:
        return False
    return Adapters(model).base(dict(CheckpointFormat(model).metadata())) is not None
