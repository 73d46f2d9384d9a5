"""Checks of the options of the off-policy correction (rho), for tokens that another policy sampled."""

from collections.abc import Iterator

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown


def one_old_policy(args: GRPOConfig) -> Iterator[str]:
    if args.use_vllm_logprobs and args.use_rho_correction:
        options = shown(args, "use_vllm_logprobs", "use_rho_correction")
        yield (
            f"{options}: with the engine's log-probs as the old policy, rho is always 1 and corrects nothing. Leave out "
            f"one of the two."
        )


def rho_bounds_are_in_order(args: GRPOConfig) -> Iterator[str]:
    for kind in ("clamp", "mask"):
        low, high = f"rho_{kind}_lower_bound", f"rho_{kind}_upper_bound"
        if 0 < getattr(args, high) < getattr(args, low):
            yield (
                f"{shown(args, low, high)}: the lower bound is above the upper bound. Exchange them, or set the upper "
                f"bound to 0 for none."
            )
    if args.rho_mask_tv_divergence and args.rho_mask_sequence_level:
        options = shown(args, "rho_mask_tv_divergence", "rho_mask_sequence_level")
        yield f"{options}: both decide which responses are masked. Leave out one of the two."
    elif args.rho_mask_tv_divergence and args.rho_mask_upper_bound == 0:
        options = shown(args, "rho_mask_tv_divergence", "rho_mask_upper_bound")
        yield f"{options}: nothing would be masked. Set an upper bound, such as 0.1."
    elif args.rho_mask_tv_divergence and args.rho_mask_lower_bound > 0 and not args.rho_as_in_open_instruct:
        options = shown(args, "rho_mask_tv_divergence", "rho_mask_lower_bound")
        yield f"{options}: no response is too near to the policy. Leave out rho_mask_lower_bound."
    elif args.rho_mask_sequence_level and args.rho_mask_lower_bound == args.rho_mask_upper_bound == 0:
        options = shown(args, "rho_mask_sequence_level", "rho_mask_lower_bound", "rho_mask_upper_bound")
        yield f"{options}: nothing would be masked. Set a lower or an upper bound."
    if args.rho_as_in_open_instruct and not (args.rho_mask_sequence_level or args.rho_mask_tv_divergence):
        options = shown(args, "rho_as_in_open_instruct", "rho_mask_sequence_level", "rho_mask_tv_divergence")
        yield f"{options}: it says how these two mask, and neither is on. Set one of them, or leave out rho_as_in_open_instruct."
