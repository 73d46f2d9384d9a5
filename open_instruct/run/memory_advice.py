"""What makes a run smaller that needs more memory than there is. An option is not proposed if it is given already, or if it would
change nothing for this run."""

from collections.abc import Iterable, Iterator, Sequence

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.run.main_memory import NodeLoad
from open_instruct.weight_transports import RAY_OBJECT


def smaller_learners(args: GRPOConfig) -> str:
    """What makes the learners smaller, as a sentence after a space; "" if nothing is left that would."""
    return _sentence(_for_learners(args))


def less_main_memory(args: GRPOConfig, loads: Sequence[NodeLoad]) -> str:
    """What lowers the need for main memory on nodes with GPUs, as a sentence after a space; "" if nothing is left that would."""
    options = _that_use_main_memory(args)
    left_out = f"each of these left out: {', '.join(options)}" if options else ""
    return _sentence([*_for_main_memory(args, loads), *([left_out] if left_out else [])])


def _sentence(proposals: Iterable[str]) -> str:
    text = ", ".join(proposals)
    return f" What makes it smaller: {text}." if text else ""


def _for_learners(args: GRPOConfig) -> Iterator[str]:
    yield "more learners" if args.deepspeed_stage == 3 else "--deepspeed_stage 3 with more learners"
    on_cpu = args.device.kind == "cpu"  # there, what is offloaded stays in the same memory
    if not on_cpu and not args.deepspeed_offload_optimizer:
        yield "--deepspeed_offload_optimizer"
    if not args.gradient_checkpointing:
        yield "--gradient_checkpointing"
    if not args.use_peft:
        yield "--use_peft"
    if args.pack_length > args.max_sequence_length:
        yield f"a smaller --pack_length (at least {args.max_sequence_length:,}, the longest prompt with its response)"
    else:
        yield "shorter rows (--max_prompt_token_length and --response_length, then --pack_length)"
    yield "more learners for each row (--sequence_parallel_size)"
    if _has_reference(args):
        yield "--load_ref_policy False with --beta 0"


def _has_reference(args: GRPOConfig) -> bool:
    """Whether learners hold a second model. With adapters the reference is the model without them."""
    return args.load_ref_policy and not args.use_peft


def _for_main_memory(args: GRPOConfig, loads: Sequence[NodeLoad]) -> Iterator[str]:
    yield "more learners" if args.deepspeed_stage == 3 else "--deepspeed_stage 3 with more learners"
    if any(load.num_learners > 1 for load in loads):
        yield "fewer learners on a node"
    if not args.use_peft:
        yield "--use_peft"


def _that_use_main_memory(args: GRPOConfig) -> list[str]:
    in_force = {
        "--deepspeed_offload_optimizer": args.deepspeed_offload_optimizer,
        "--deepspeed_offload_param": args.deepspeed_offload_param,
        "--colocate": args.colocate,
        "--engine_sleep_after_s": args.engine_sleep_after_s is not None,
        "--ref_policy_update_freq": args.ref_policy_update_freq is not None and _has_reference(args),
        "--weight_transport ray_object": args.weight_transport == RAY_OBJECT,
    }
    return [option for option, holds in in_force.items() if holds]
