"""Checks of the options of sampling."""

from collections.abc import Iterator

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.workflows.base import WORKFLOWS


def evaluated_responses_differ(args: GRPOConfig) -> Iterator[str]:
    """vLLM refuses several greedy responses in one request, and the engine would die."""
    are_alike = WORKFLOWS[args.rollout_workflow].value.greedy_responses_are_alike
    if args.eval_temperature == 0 and args.eval_pass_at_k > 1 and are_alike:
        options = shown(args, "eval_pass_at_k", "eval_temperature")
        yield f"{options}: greedy responses are all the same. Set eval_pass_at_k to 1, or eval_temperature above 0."


LOWEST_TEMPERATURE = 0.01
"""The lowest temperature of vLLM. A lower temperature, except 0, is raised to it."""


def engines_sample_at_the_temperature(args: GRPOConfig) -> Iterator[str]:
    """Otherwise the learner would divide by the requested temperature, and compute other log-probs than the engine."""
    for name, cure in (("temperature", ""), ("eval_temperature", ", or 0 for greedy responses")):
        value = getattr(args, name)
        if value is not None and 0 < value < LOWEST_TEMPERATURE:
            lowest = f"{LOWEST_TEMPERATURE} in its place"
            yield f"{shown(args, name)}: the engine would take {lowest}. Give {LOWEST_TEMPERATURE} or more{cure}."
