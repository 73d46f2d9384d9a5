"""What makes a run smaller that needs more memory than there is, and what each change would save. An option is not proposed if it
is given already, or if it would save next to nothing for this run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig, num_places_needed
from open_instruct.run.main_memory import NodeLoad
from open_instruct.weight_transports import RAY_OBJECT

LEAST_SHARE = 0.01
"""A change is proposed if it saves more than this share of what the run needs."""
GIB = 2**30


@dataclass(frozen=True)
class Change:
    """Options that would make a run smaller."""

    text: str
    """The options as a user writes them."""
    options: Mapping[str, Any]
    """Their values, by name."""
    needs_devices: bool = False
    """Whether the run then needs more GPUs or machines."""


@dataclass(frozen=True)
class Saving:
    """What a change would save."""

    change: Change
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.change.text} (saves {gib(self.num_bytes)})"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"


def savings(args: GRPOConfig, needed: Callable[[GRPOConfig], int]) -> list[Saving]:
    """The changes that make a run smaller, the one that saves most first.

    Args:
        needed: computes the bytes that a run with these options needs, such as `memory_needs.needed_on_device`.
    """
    now = needed(args)
    computed = [Saving(change, now - needed(replace(args, **change.options))) for change in changes(args)]
    worthwhile = [saving for saving in computed if saving.num_bytes > LEAST_SHARE * now]
    return sorted(worthwhile, key=lambda saving: -saving.num_bytes)


def advice(args: GRPOConfig, available: int, needed: Callable[[GRPOConfig], int]) -> str:
    """Lines that name each change with what it saves, and the first few that are enough together; "" if nothing helps.

    Args:
        available: bytes that there are.
    """
    proposed = savings(args, needed)
    if not proposed:
        return ""
    lines = [f"  {saving.change.text:<60} saves {gib(saving.num_bytes):>10}" for saving in proposed]
    return "\n".join(["", "What makes it smaller:", *lines, _together(args, proposed, available, needed)])


def _together(args: GRPOConfig, proposed: Sequence[Saving], available: int, needed: Callable[[GRPOConfig], int]) -> str:
    """How much a run needs with the fewest changes that are enough, those first that need no further devices."""
    texts: list[str] = []
    rest = needed(args)
    for saving in sorted(proposed, key=lambda saving: saving.change.needs_devices):
        changed = replace(args, **saving.change.options)
        if (smaller := needed(changed)) < rest:
            args, rest = changed, smaller
            texts.append(saving.change.text)
        if rest <= available:
            return f"With {' and '.join(texts)} it needs {gib(rest)}, which fits."
    return f"All of them together need {gib(rest)}, which is still too much."


def changes(args: GRPOConfig) -> Iterator[Change]:
    """Changes of options that may make the learners smaller, or what shares their GPU, without those that are in force."""
    on_cpu = args.device.kind == "cpu"  # there, what is offloaded stays in the same memory
    yield from _dividing(args)
    if not on_cpu and not args.deepspeed_offload_optimizer:
        yield _with_stage(args, 2, "--deepspeed_offload_optimizer", deepspeed_offload_optimizer=True)
    if not on_cpu and args.deepspeed_stage == 3 and not args.deepspeed_offload_param:
        yield Change("--deepspeed_offload_param", {"deepspeed_offload_param": True})
    if not args.gradient_checkpointing:
        yield Change("--gradient_checkpointing", {"gradient_checkpointing": True})
    if not args.use_peft:
        yield Change("--use_peft", {"use_peft": True, "ref_policy_update_freq": None})
    yield from _shorter_rows(args)
    if args.load_ref_policy and not args.use_peft:  # with adapters the reference is the model without them
        options = {"load_ref_policy": False, "beta": 0.0, "ref_policy_update_freq": None}
        yield Change("--load_ref_policy False --beta 0", options)
    if args.single_gpu_mode and not on_cpu:
        yield Change("--colocate in place of --single_gpu_mode", {"colocate": True, "single_gpu_mode": False})


def _with_stage(args: GRPOConfig, stage: int, text: str, **options: Any) -> Change:
    """A change that needs at least a stage of ZeRO."""
    if args.deepspeed_stage >= stage:
        return Change(text, options)
    return Change(f"--deepspeed_stage {stage} {text}", {"deepspeed_stage": stage, **options})


def _dividing(args: GRPOConfig) -> Iterator[Change]:
    """Changes that divide the states or the rows among learners."""
    if args.num_learners > 1 and args.deepspeed_stage < 3:
        yield Change("--deepspeed_stage 3", {"deepspeed_stage": 3})
    counts = [2 * number for number in args.num_learners_per_node]
    options = {"num_learners_per_node": counts}
    if args.single_gpu_mode or not _has_places(args, options):
        return
    text = f"--num_learners_per_node {' '.join(map(str, counts))}"
    more = _with_stage(args, 3, text, **options)
    yield replace(more, needs_devices=True)
    halves = {**options, "sequence_parallel_size": 2 * args.sequence_parallel_size}
    yield Change(f"{text} --sequence_parallel_size {halves['sequence_parallel_size']}", halves, needs_devices=True)


def _has_places(args: GRPOConfig, options: Mapping[str, Any]) -> bool:
    """Whether a machine that was described by `--num_gpus` has room for the run with other options."""
    return args.num_gpus is None or num_places_needed(replace(args, **options)) <= args.num_gpus


def _shorter_rows(args: GRPOConfig) -> Iterator[Change]:
    if args.pack_length > args.max_sequence_length:
        length = args.max_sequence_length
        yield Change(f"--pack_length {length} (a prompt with its response)", {"pack_length": length})
        return
    response, prompt = args.response_length // 2, args.max_prompt_token_length
    if response > 1 and args.pack_length == prompt + args.response_length:
        options = {"response_length": response, "pack_length": prompt + response}
        yield Change(f"--response_length {response} --pack_length {prompt + response}", options)


def less_main_memory(args: GRPOConfig, loads: Sequence[NodeLoad]) -> str:
    """What lowers the need for main memory on nodes with GPUs, as a sentence after a space; "" if nothing is left that would."""
    options = _that_use_main_memory(args)
    left_out = f"each of these left out: {', '.join(options)}" if options else ""
    return _sentence([*_for_main_memory(args, loads), *([left_out] if left_out else [])])


def _sentence(proposals: Iterable[str]) -> str:
    text = ", ".join(proposals)
    return f" What makes it smaller: {text}." if text else ""


def _for_main_memory(args: GRPOConfig, loads: Sequence[NodeLoad]) -> Iterator[str]:
    yield "more learners" if args.deepspeed_stage == 3 else "--deepspeed_stage 3 with more learners"
    if any(load.num_learners > 1 for load in loads):
        yield "fewer learners on a node"
    if not args.use_peft:
        yield "--use_peft"


def _that_use_main_memory(args: GRPOConfig) -> list[str]:
    has_reference = args.load_ref_policy and not args.use_peft
    in_force = {
        "--deepspeed_offload_optimizer": args.deepspeed_offload_optimizer,
        "--deepspeed_offload_param": args.deepspeed_offload_param,
        "--colocate": args.colocate,
        "--engine_sleep_after_s": args.engine_sleep_after_s is not None,
        "--ref_policy_update_freq": args.ref_policy_update_freq is not None and has_reference,
        "--weight_transport ray_object": args.weight_transport == RAY_OBJECT,
    }
    return [option for option, holds in in_force.items() if holds]
