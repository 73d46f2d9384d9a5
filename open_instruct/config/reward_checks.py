"""Checks of the options of rewards."""

import math
import os
from collections.abc import Iterator

from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.system.sandbox import missing
from open_instruct.workflows.base import WORKFLOWS


def remapped_verifiers_are_pairs(args: GRPOConfig) -> Iterator[str]:
    for pair in args.remap_verifier:
        old, _, new = pair.partition("=")
        if not old.strip() or not new.strip():
            yield f"{shown(args, 'remap_verifier')}: {pair!r} is no pair of names. Write old=new, such as math_dapo=math."


def reward_functions_are_apart(args: GRPOConfig) -> Iterator[str]:
    if args.reward_weights and len(args.reward_weights) != len(args.reward_funcs):
        options = shown(args, "reward_weights", "reward_funcs")
        num_weights, num_functions = len(args.reward_weights), len(args.reward_funcs)
        yield f"{options}: {num_weights} weights for {num_functions} functions. Give one for each, or none."
    if not all(map(math.isfinite, args.reward_weights)):
        yield f"{shown(args, 'reward_weights')}: a weight is not finite. Give numbers."
    names = [spec.name for spec in args.reward_functions]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        yield f"{shown(args, 'reward_funcs')}: two functions are called {name}, and metrics go by name. Rename one."


def reward_functions_fit_the_workflow(args: GRPOConfig) -> Iterator[str]:
    workflow = WORKFLOWS[args.rollout_workflow].value
    if args.reward_funcs and not workflow.adds_rewards:
        options = shown(args, "reward_funcs", "rollout_workflow")
        yield f"{options}: this workflow makes its rewards from verifiers' scores alone. Use verifiers, or another workflow."


def jail_of_reward_functions_is_there(args: GRPOConfig) -> Iterator[str]:
    if args.reward_jail and (lacking := missing()):
        yield f"{shown(args, 'reward_jail')}: this machine has no jail: {'; '.join(lacking)}. Leave it out."
    elif args.reward_jail and not args.reward_funcs:
        yield f"{shown(args, 'reward_jail')}: there are no --reward_funcs, so it does nothing. Leave it out."


def something_is_rewarded(args: GRPOConfig) -> Iterator[str]:
    shaping, workflow = args.reward_shaping, WORKFLOWS[args.rollout_workflow].value
    if args.reward_funcs:
        return
    if args.apply_verifiable_reward or args.has_teacher or shaping.overlong_buffer or workflow.may_reward(args):
        return
    if shaping.form == "ignored" or shaping.form_reward == 0:
        cures = ["reward_funcs", "apply_r1_style_format_reward", *workflow.reward_options]
        yield (
            f"{shown(args, 'apply_verifiable_reward')}: then no response has a reward. Set {' or '.join(cures)}, or leave this "
            f"out."
        )


def judgements_have_a_price(args: GRPOConfig) -> Iterator[str]:
    prices = args.llm_judge_price_per_million_tokens
    if len(prices) != 2 or not all(0 <= price < float("inf") for price in prices):
        yield (
            f"{shown(args, 'llm_judge_price_per_million_tokens')}: give two prices in US dollars, of what the judge reads and of "
            f"what it writes, such as 0.15 0.6."
        )


def evolving_rubrics_have_a_model(args: GRPOConfig) -> Iterator[str]:
    if args.apply_evolving_rubric_reward and not (args.llm_judge_model or os.environ.get("RUBRIC_GENERATION_MODEL")):
        yield f"{shown(args, 'apply_evolving_rubric_reward')}: no model finds the criteria. Give --llm_judge_model."


def overlong_buffer_fits(args: GRPOConfig) -> Iterator[str]:
    if args.overlong_buffer_len > args.response_length:
        options = shown(args, "overlong_buffer_len", "response_length")
        yield f"{options}: the penalty would begin before the first token. Set overlong_buffer_len to response_length or less."


def rewards_fit_the_advantage(args: GRPOConfig) -> Iterator[str]:
    if ADVANTAGES.fact(args.advantage_normalization_type, "over_step") and args.streaming:
        options = shown(args, "advantage_normalization_type", "streaming")
        yield f"{options}: this advantage needs the rewards of the whole step first. Leave out streaming."
    negative = _makes_rewards_negative(args)
    if args.advantage_normalization_type == "maxrl" and negative:
        options = shown(args, "advantage_normalization_type", *negative)
        yield (
            f"{options}: a reward may be negative, which maxrl counts as 0. Choose another advantage, or leave out the penalty."
        )


def _makes_rewards_negative(args: GRPOConfig) -> list[str]:
    """Options that can make a reward negative. The rewards of environments are not known before the run."""
    shaping = args.reward_shaping
    may_be_negative = {
        "overlong_buffer_len": shaping.overlong_buffer > 0 and shaping.overlong_penalty > 0,
        "non_stop_penalty_value": shaping.non_stop_reward is not None and shaping.non_stop_reward < 0,
        "r1_style_format_reward": shaping.form == "rewarded" and shaping.form_reward < 0,
    }
    return [option for option, is_negative in may_be_negative.items() if is_negative]
