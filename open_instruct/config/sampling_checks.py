"""Checks of the options of sampling and of evaluation."""

from collections.abc import Iterator

from open_instruct.config.evaluation_sets import mistakes_in_sets
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_limits import LOWEST_TEMPERATURE, NEVER
from open_instruct.option_text import shown
from open_instruct.workflows.base import WORKFLOWS


def evaluation_sets_can_be_read(args: GRPOConfig) -> Iterator[str]:
    yield from mistakes_in_sets(args)
    if args.dataset_mixer_eval_list and args.eval_sets:
        options = shown(args, "dataset_mixer_eval_list", "eval_sets")
        yield f"{options}: both name the data to evaluate on. Name all of them in eval_sets."
    default = GRPOConfig.__dataclass_fields__["dataset_mixer_eval_list_splits"].default_factory()
    if args.eval_sets and args.dataset_mixer_eval_list_splits != default:
        options = shown(args, "dataset_mixer_eval_list_splits", "eval_sets")
        split = args.dataset_mixer_eval_list_splits[0] if args.dataset_mixer_eval_list_splits else default[0]
        yield f"{options}: the splits are those of dataset_mixer_eval_list. Give each set its own, NAME.split={split}."


def evaluation_has_data_and_a_time(args: GRPOConfig) -> Iterator[str]:
    never = [evaluation_set.name for evaluation_set in args.evaluation_sets if evaluation_set.interval == NEVER]
    if never and not args.eval_on_step_0:
        data = "eval_sets" if args.eval_sets else "dataset_mixer_eval_list"
        suffix = f" of {', '.join(never)}" if args.eval_sets else ""
        cure = "Set local_eval_every or an interval" if args.eval_sets else "Set local_eval_every"
        options = shown(args, data, "local_eval_every", "eval_on_step_0")
        yield f"{options}: the evaluation{suffix} would never run. {cure}, or leave out the datasets."
    if args.eval_on_step_0 and not (args.dataset_mixer_eval_list or args.eval_sets):
        options = shown(args, "eval_on_step_0", "dataset_mixer_eval_list")
        yield f"{options}: there is nothing to evaluate on. Name datasets, or leave out eval_on_step_0."


def evaluated_responses_differ(args: GRPOConfig) -> Iterator[str]:
    """vLLM refuses several greedy responses in one request, and the engine would die."""
    if not WORKFLOWS[args.rollout_workflow].value.greedy_responses_are_alike:
        return
    if args.eval_temperature == 0 and args.eval_pass_at_k > 1 and not args.eval_sets:
        options = shown(args, "eval_pass_at_k", "eval_temperature")
        yield f"{options}: greedy responses are all the same. Set eval_pass_at_k to 1, or eval_temperature above 0."
    for evaluation_set in args.evaluation_sets if args.eval_sets else ():
        name, sampling = evaluation_set.name, evaluation_set.sampling
        if sampling.temperature == 0 and sampling.n > 1:
            options = shown(args, "eval_sets", "eval_pass_at_k", "eval_temperature")
            cure = f"Set {name}.samples to 1, or {name}.temperature above 0"
            yield f"{options}: {name} has {sampling.n} greedy responses to a prompt, which are all the same. {cure}."


def engines_sample_at_the_temperature(args: GRPOConfig) -> Iterator[str]:
    """Otherwise the learner would divide by the requested temperature, and compute other log-probs than the engine."""
    for name, cure in (("temperature", ""), ("eval_temperature", ", or 0 for greedy responses")):
        value = getattr(args, name)
        if value is not None and 0 < value < LOWEST_TEMPERATURE:
            lowest = f"{LOWEST_TEMPERATURE} in its place"
            yield f"{shown(args, name)}: the engine would take {lowest}. Give {LOWEST_TEMPERATURE} or more{cure}."


def old_keys_are_kept_or_computed_again(args: GRPOConfig) -> Iterator[str]:
    if args.vllm_keep_prefix_cache and args.vllm_recompute_kv_cache:
        options = shown(args, "vllm_keep_prefix_cache", "vllm_recompute_kv_cache")
        yield f"{options}: one uses keys and values of older weights, the other never does. Leave out one of the two."
