"""Checks of losses and advantages from a user's file: they are computed once, on small inputs, before a run starts."""

from collections.abc import Iterator
from typing import Any

from open_instruct.algorithms import user_algorithm_check
from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.algorithms.distillation import DISTILLATION_LOSSES
from open_instruct.algorithms.losses import LOSSES
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.registry import Entry, Registry, options_of

OURS = "open_instruct."


def own_losses_can_be_computed(args: GRPOConfig) -> Iterator[str]:
    if entry := _own(args, LOSSES):
        problem = user_algorithm_check.problem_with_loss(
            entry, options_of(args, entry.options), has_reference=args.load_ref_policy
        )
        yield from _mistake(args, LOSSES, problem)
    if args.has_teacher and (entry := _own(args, DISTILLATION_LOSSES)):
        problem = user_algorithm_check.problem_with_distillation_loss(entry, options_of(args, entry.options))
        yield from _mistake(args, DISTILLATION_LOSSES, problem)


def own_advantage_can_be_computed(args: GRPOConfig) -> Iterator[str]:
    if entry := _own(args, ADVANTAGES):
        problem = user_algorithm_check.problem_with_advantage(
            entry,
            options_of(args, entry.options),
            group_size=max(args.num_samples_per_prompt_rollout, 1),
            equal_rewards=not args.leaves_out_zero_std,
        )
        yield from _mistake(args, ADVANTAGES, problem)


def _own(args: GRPOConfig, registry: Registry[Any]) -> Entry[Any] | None:
    """The chosen entry, if it comes from a user's file; else None."""
    name = getattr(args, registry.flag)
    entry = registry[name] if name in registry.names else None
    return None if entry is None or entry.value.__module__.startswith(OURS) else entry


def _mistake(args: GRPOConfig, registry: Registry[Any], problem: str) -> Iterator[str]:
    if problem:
        yield f"{shown(args, registry.flag)}: {problem}. Mend it in its file (docs/guides/algorithms.md)."
