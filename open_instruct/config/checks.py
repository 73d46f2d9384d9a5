"""Which values of options are mistakes: one short function per rule; all mistakes are reported together.

A mistake has the form `--flag value: what is wrong. What to do.` The part before the colon names every option that the rule has
looked at. `cli.py` relies on this: it leaves out a mistake about an option whose value it could not read.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Literal, get_args, get_origin

from open_instruct.algorithms import denominators
from open_instruct.algorithms.distillation import DISTILLATION_LOSSES
from open_instruct.algorithms.losses import LOSSES
from open_instruct.config.algorithm_checks import own_advantage_can_be_computed, own_losses_can_be_computed
from open_instruct.config.correction_checks import one_old_policy, rho_bounds_are_in_order
from open_instruct.config.engine_arguments import engine_arguments_are_free
from open_instruct.config.grpo_config import GRPOConfig, num_places_needed
from open_instruct.config.model_checks import (
    adapters_have_layers,
    engines_can_divide_heads,
    layers_can_be_compiled,
    layers_can_compute_again,
    model_can_be_read,
    model_family_can_be_trained,
    model_has_enough_positions,
    rows_can_be_divided,
    teacher_fits_the_model,
)
from open_instruct.config.options import DistillationOptions
from open_instruct.config.path_checks import (
    checkpoints_and_models_have_their_own_names,
    outputs_can_be_written,
    system_prompt_file_can_be_read,
    the_receiver_of_traces_has_an_address,
)
from open_instruct.config.reward_checks import (
    evolving_rubrics_have_a_model,
    jail_of_reward_functions_is_there,
    judgements_have_a_price,
    overlong_buffer_fits,
    remapped_verifiers_are_pairs,
    reward_functions_are_apart,
    reward_functions_fit_the_workflow,
    rewards_fit_the_advantage,
    something_is_rewarded,
)
from open_instruct.config.sampling_checks import (
    engines_sample_at_the_temperature,
    evaluated_responses_differ,
    evaluation_has_data_and_a_time,
    evaluation_sets_can_be_read,
    old_keys_are_kept_or_computed_again,
)
from open_instruct.device import flash_attention_can_run, places_explained
from open_instruct.option_limits import POSITIVE, numbers_are_within_limits
from open_instruct.option_text import shown
from open_instruct.registry import chosen_entries, option_kinds
from open_instruct.system.counted import counted
from open_instruct.weight_transports import IPC, NCCL, NEEDS_GPU, SHM, WITHOUT_GPU
from open_instruct.workflows.base import WORKFLOWS


def collect_mistakes(args: GRPOConfig) -> list[str]:
    """All mistakes in the options; empty if there are none. Tokenizer (`load_tokenizer`) and data are checked elsewhere."""
    return [mistake for rule in RULES for mistake in rule(args)]


MOST_OF_SHARED_GPU = 0.5
"""Largest share of a GPU's memory that an engine may take if a learner stays in the same memory."""


def every_node_has_learners(args: GRPOConfig) -> Iterator[str]:
    if not args.num_learners_per_node or min(args.num_learners_per_node) < 1:
        yield f"{shown(args, 'num_learners_per_node')}: every node needs a learner. Give 1 or more for each node."


def learners_form_whole_groups(args: GRPOConfig) -> Iterator[str]:
    for name in ("sequence_parallel_size", "deepspeed_zpg"):
        if (size := getattr(args, name)) > 0 and args.num_learners % size:
            groups = f"{args.num_learners} learners cannot be divided into groups of {size}"
            options = shown(args, name, "num_learners_per_node")
            yield f"{options}: {groups}. Give a number that divides {args.num_learners}."


def choices_are_known(args: GRPOConfig) -> Iterator[str]:
    for name, hint in option_kinds(type(args)).items():
        if get_origin(hint) is Literal and getattr(args, name) not in get_args(hint):
            yield f"{shown(args, name)}: unknown. Choose one of {', '.join(map(str, get_args(hint)))}."


def loss_denominator_is_known(args: GRPOConfig) -> Iterator[str]:
    for name in ("loss_denominator", "kl_denominator"):
        value = getattr(args, name)
        if value is None or value in denominators.KINDS:
            continue
        if isinstance(value, str) or not POSITIVE.hold(value):
            kinds = ", ".join(denominators.KINDS)
            yield f"{shown(args, name)}: the loss cannot be divided by it. Give {kinds} or a number above 0."


def staleness_bounds_are_in_order(args: GRPOConfig) -> Iterator[str]:
    if args.staleness_bound < args.staleness_target:
        options = shown(args, "max_staleness_allowed", "staleness_threshold", "async_steps")
        yield (
            f"{options}: pacing aims at samples that are older than the bound allows. Set max_staleness_allowed to "
            f"{args.staleness_target} or more."
        )


def one_option_says_how_far_ahead(args: GRPOConfig) -> Iterator[str]:
    ahead, threshold = args.async_steps, args.staleness_threshold
    if ahead is not None and threshold is not None and ahead != threshold and min(ahead, threshold) >= 0:
        options = shown(args, "async_steps", "staleness_threshold")
        yield f"{options}: both say how far generation may run ahead. Leave out one of the two; in a YAML file, set it to null."


def over_issuing_has_room(args: GRPOConfig) -> Iterator[str]:
    """A prompt that one step leaves to the next step becomes older than the threshold that pacing aims at."""
    if args.over_issued_prompts <= 0:
        return
    if args.staleness_target < 1 or args.staleness_bound <= args.staleness_target:
        options = shown(args, "over_issued_prompts", "staleness_threshold", "max_staleness_allowed", "async_steps")
        yield (
            f"{options}: a prompt that a step leaves to the next step becomes older than the threshold. Set "
            f"staleness_threshold to 1 or more and max_staleness_allowed to more than that, or over_issued_prompts to 0."
        )
    if args.over_issued_prompts > args.num_unique_prompts_rollout:
        options = shown(args, "over_issued_prompts", "num_unique_prompts_rollout")
        yield f"{options}: more prompts than a step takes. Give {args.num_unique_prompts_rollout} or fewer."


def weights_are_sent_within_the_threshold(args: GRPOConfig) -> Iterator[str]:
    needed = args.trigger_parameter_sync_step - 1
    if 0 <= args.staleness_target < needed:
        options = shown(args, "trigger_parameter_sync_step", "staleness_threshold", "async_steps")
        yield (
            f"{options}: between two updates of the engines' weights samples become {needed} steps old. Set "
            f"staleness_threshold to {needed} or more, or trigger_parameter_sync_step to 1."
        )


def truncation_has_fresh_tokens(args: GRPOConfig) -> Iterator[str]:
    if args.straggler_policy == "truncate" and not args.inflight_updates:
        options = shown(args, "straggler_policy", "inflight_updates")
        yield f"{options}: without in-flight updates all tokens of a response have the same age. Use drop or wait."


def streaming_has_one_update_a_step(args: GRPOConfig) -> Iterator[str]:
    if args.streaming and args.num_epochs * args.num_mini_batches > 1:
        options = shown(args, "streaming", "num_epochs", "num_mini_batches")
        yield (
            f"{options}: with streaming a step begins before its batch is complete, so it can make only one update. Set "
            f"num_epochs and num_mini_batches to 1, or leave out streaming."
        )


def queue_holds_a_step(args: GRPOConfig) -> Iterator[str]:
    needed = args.num_unique_prompts_rollout * args.lengths.samples
    if args.max_queue_size is not None and 0 < args.max_queue_size < needed:
        options = shown(args, "max_queue_size", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        yield f"{options}: the queue cannot hold one step. Set max_queue_size to {needed} or more, or leave it out."


NEEDS: dict[str, tuple[str, Callable[[GRPOConfig], bool]]] = {
    **{
        name: ("use_rho_correction", lambda args: args.corrects_off_policy)
        for name in (
            "rho_clamp_lower_bound",
            "rho_clamp_upper_bound",
            "rho_mask_lower_bound",
            "rho_mask_upper_bound",
            "rho_level",
            "rho_mask_sequence_level",
            "rho_mask_tv_divergence",
            "rho_as_in_open_instruct",
        )
    },
    **{
        name: ("use_peft", lambda args: args.use_peft)
        for name in ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "save_merged_lora")
    },
    "gpu_memory": ("dry_run", lambda args: args.dry_run),
    "num_gpus": ("gpu_memory", lambda args: args.gpu_memory is not None),
    "vllm_keep_prefix_cache": (
        "vllm_enable_prefix_caching",
        lambda args: args.vllm_enable_prefix_caching is not False,
    ),
    "deepspeed_offload_optimizer": ("deepspeed_stage 2", lambda args: args.deepspeed_stage >= 2),
    "deepspeed_offload_param": ("deepspeed_stage 3", lambda args: args.deepspeed_stage == 3),
    "deepspeed_zpg": ("deepspeed_stage 3", lambda args: args.deepspeed_stage == 3),
    "alpha": ("ref_policy_update_freq", lambda args: args.ref_policy_update_freq is not None),
    "r1_style_format_reward": ("apply_r1_style_format_reward", lambda args: args.apply_r1_style_format_reward),
    "additive_format_reward": ("apply_r1_style_format_reward", lambda args: args.apply_r1_style_format_reward),
    "non_stop_penalty_value": ("non_stop_penalty", lambda args: args.non_stop_penalty),
    "overlong_penalty_factor": ("overlong_buffer_len", lambda args: args.overlong_buffer_len > 0),
    "save_traces": ("record", lambda args: args.record),
    "watch": ("record", lambda args: args.record),
    "metrics_host": ("metrics_port", lambda args: args.metrics_port is not None),
    "record_keep_steps": ("record", lambda args: args.record),
}
"""Options that need another option: the name (and value) of that option, and whether it is set."""


def options_have_an_effect(args: GRPOConfig) -> Iterator[str]:
    """An option without effect is a mistake, because a researcher who gives an option believes that it was used."""
    default = type(args)(model_name_or_path=args.model_name_or_path)
    for name, (other, is_on) in NEEDS.items():
        if getattr(args, name) != getattr(default, name) and not is_on(args):
            options = shown(args, name, other.partition(" ")[0])
            without = other == "use_rho_correction" and args.use_vllm_logprobs
            cure = "Leave out use_vllm_logprobs" if without else f"Set {other} too"
            yield f"{options}: it would have no effect. {cure}, or leave out {name}."
    for name in LOSSES.fact(args.loss_fn, "ignores", ()):
        if getattr(args, name) != getattr(default, name):
            options = shown(args, "loss_fn", name)
            yield f"{options}: the loss {args.loss_fn} does not use {name}. Leave it out, or choose another loss."


def parts_know_their_denominators(args: GRPOConfig) -> Iterator[str]:
    if args.ce_coef and args.streaming:
        options = shown(args, "ce_coef", "streaming")
        yield f"{options}: the number of inserted tokens is known only when the step is complete. Leave out one of the two."
    if args.denominator_of_kl != args.denominator and args.streaming:
        options = shown(args, "kl_denominator", "loss_denominator", "loss_fn", "streaming")
        yield f"{options}: how the two compare is known only when the step is complete. Leave out kl_denominator or streaming."


def active_sampling_has_something_to_replace(args: GRPOConfig) -> Iterator[str]:
    if args.active_sampling and not args.leaves_out_zero_std and not args.has_teacher:
        options = shown(args, "active_sampling", "filter_zero_std_samples", "advantage_normalization_type")
        yield f"{options}: no group is left out, so there is nothing to replace. Leave out one of the two."


def the_reference_that_moves_is_there(args: GRPOConfig) -> Iterator[str]:
    if args.ref_policy_update_freq is not None and not args.load_ref_policy:
        options = shown(args, "ref_policy_update_freq", "load_ref_policy")
        yield f"{options}: there is no reference policy to update. Leave out one of the two."
    if args.ref_policy_update_freq is not None and args.use_peft:
        options = shown(args, "ref_policy_update_freq", "use_peft")
        yield f"{options}: with LoRA the reference policy is the model without its adapter. Leave out one of the two."


def teacher_has_something_to_say(args: GRPOConfig) -> Iterator[str]:
    if not args.has_teacher:
        for option in fields(DistillationOptions):
            if getattr(args, option.name) != option.default:
                options = shown(args, option.name, "teacher_model_name_or_path")
                yield f"{options}: there is no teacher. Name one, or leave out {option.name}."
        return
    if args.temperature != 1.0:
        options = shown(args, "teacher_model_name_or_path", "temperature")
        yield f"{options}: the teacher's probabilities are those of temperature 1. Set temperature to 1."
    if args.active_sampling:
        options = shown(args, "teacher_model_name_or_path", "active_sampling")
        yield f"{options}: with a teacher no group is left out, so there is nothing to replace. Leave out active_sampling."
    if args.distillation_top_k == 0 and DISTILLATION_LOSSES.fact(args.distillation_loss, "needs_top_k"):
        options = shown(args, "distillation_top_k", "distillation_loss")
        yield f"{options}: this loss is a sum over the teacher's likeliest tokens. Give 1 or more."


def alerts_are_limits(args: GRPOConfig) -> Iterator[str]:
    for alert in args.alerts:
        if not re.fullmatch(r"[\w/.-]+=[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", alert):
            yield f"--alerts {alert}: not a limit on a metric. Write metric=number, such as max_sample_age=3."


def stop_strings_are_not_empty(args: GRPOConfig) -> Iterator[str]:
    if "" in args.stop_strings:
        yield "--stop_strings '': an empty string would end every response at once. Leave it out."


def pack_holds_a_sample(args: GRPOConfig) -> Iterator[str]:
    needed = args.lengths.trained
    if args.pack_length < needed:
        further = WORKFLOWS[args.rollout_workflow].value.length_options
        options = shown(args, "pack_length", "max_prompt_token_length", "response_length", *further)
        yield (
            f"{options}: the longest prompt with the longest response does not fit into a row. Set pack_length to {needed} "
            f"or more."
        )


def kl_has_its_reference(args: GRPOConfig) -> Iterator[str]:
    if args.beta > 0 and not args.load_ref_policy:
        options = shown(args, "beta", "load_ref_policy")
        yield f"{options}: the KL divergence needs a reference policy. Set beta to 0, or leave load_ref_policy True."


def groups_have_something_to_compare(args: GRPOConfig) -> Iterator[str]:
    if args.num_samples_per_prompt_rollout == 1 and args.compares_within_groups:
        options = shown(args, "num_samples_per_prompt_rollout", "advantage_normalization_type")
        yield f"{options}: a response is compared with the other responses of its group. Give 2 or more."


def episodes_fill_a_step(args: GRPOConfig) -> Iterator[str]:
    if 0 < args.total_episodes < args.num_samples_per_step:
        options = shown(args, "total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        yield (
            f"{options}: fewer episodes than one step needs. Set total_episodes to {args.num_samples_per_step} or more."
        )


def mini_batches_are_not_empty(args: GRPOConfig) -> Iterator[str]:
    if args.num_mini_batches > args.num_samples_per_step > 0:
        options = shown(args, "num_mini_batches", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        yield f"{options}: more mini-batches than responses in a step. Give {args.num_samples_per_step} or fewer."


def single_gpu_has_one_of_each(args: GRPOConfig) -> Iterator[str]:
    if not args.single_gpu_mode:
        return
    names = "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size"
    if [args.num_learners_per_node, args.vllm_num_engines, args.vllm_tensor_parallel_size] != [[1], 1, 1]:
        yield (
            f"{shown(args, 'single_gpu_mode', *names)}: the GPU is shared by one learner and one engine. Set each of these "
            f"numbers to 1."
        )
    if args.device.kind != "cpu" and args.vllm_gpu_memory_utilization > MOST_OF_SHARED_GPU:
        options = shown(args, "single_gpu_mode", "vllm_gpu_memory_utilization")
        yield (
            f"{options}: the engine would take most of the GPU memory, and the learner would run out of memory. Set "
            f"vllm_gpu_memory_utilization to {MOST_OF_SHARED_GPU} or less (0.3 leaves room for most models), or use colocate."
        )


def turns_have_an_order(args: GRPOConfig) -> Iterator[str]:
    """With `colocate`, engines sleep while learners train, so nothing can be generated ahead."""
    if not args.colocate:
        return
    if args.staleness_bound > 0 or args.streaming:
        options = shown(args, "colocate", "async_steps", "max_staleness_allowed", "streaming")
        yield (
            f"{options}: with colocate engines and learners use the devices by turns, so nothing is generated while learners "
            f"train. Set async_steps and max_staleness_allowed to 0 and leave out streaming, or leave out colocate."
        )
    if args.single_gpu_mode and args.device.kind != "cpu":
        yield (
            f"{shown(args, 'colocate', 'single_gpu_mode')}: with colocate engines and learners use the device by turns, with "
            f"single_gpu_mode both stay in its memory. Leave out one of the two."
        )
    if args.engine_sleep_after_s is not None:
        options = shown(args, "colocate", "engine_sleep_after_s")
        yield f"{options}: with colocate engines sleep whenever learners train. Leave out engine_sleep_after_s."


def weight_transport_fits(args: GRPOConfig) -> Iterator[str]:
    """NCCL refuses two processes on one GPU. `ipc` needs both processes on one GPU, because they share its memory."""
    chosen, has_gpu = args.weight_transport, args.device.kind == "cuda"
    cure = "Leave out weight_transport, or set it to ray_object, which works everywhere."
    if chosen in NEEDS_GPU and not has_gpu:
        yield f"{shown(args, 'weight_transport')}: this machine has no GPU. {cure}"
    elif chosen in WITHOUT_GPU and has_gpu:
        yield f"{shown(args, 'weight_transport')}: this transport is for machines without a GPU. {cure}"
    elif chosen == SHM and len(args.num_learners_per_node) > 1:
        options = shown(args, "weight_transport", "num_learners_per_node")
        yield f"{options}: the shared memory of one node cannot be read on another. {cure}"
    elif (chosen == NCCL and args.shares_devices) or (chosen == IPC and not args.shares_devices):
        why = "share GPUs, which NCCL refuses" if args.shares_devices else "share no GPU, which ipc needs"
        yield f"{shown(args, 'weight_transport', 'colocate', 'single_gpu_mode')}: engines and learners {why}. {cure}"
    elif chosen == IPC and args.num_engine_workers != args.num_learners:
        options = shown(
            args, "weight_transport", "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size"
        )
        yield f"{options}: ipc needs a worker of an engine on the GPU of each learner. {cure}"


def colocated_engines_fit(args: GRPOConfig) -> Iterator[str]:
    needed = args.vllm_num_engines * args.vllm_tensor_parallel_size
    if args.colocate and needed > args.num_learners:
        options = shown(args, "colocate", "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size")
        yield (
            f"{options}: the engines need {needed} places on the devices of the learners, and there are "
            f"{args.num_learners}. Ask for fewer or smaller engines."
        )


def options_have_their_entry(args: GRPOConfig) -> Iterator[str]:
    """An option of a loss, an advantage or a workflow that is not chosen must keep its default."""
    default = type(args)(model_name_or_path=args.model_name_or_path)
    for registry, name in chosen_entries(args):
        chosen = {option.name for entry in registry if entry.name == name for option in fields(entry.options)}
        owners: defaultdict[str, list[str]] = defaultdict(list)
        for entry in registry:
            for option in fields(entry.options):
                owners[option.name].append(entry.name)
        for option, names in owners.items():
            if option not in chosen and getattr(args, option) != getattr(default, option):
                yield (
                    f"{shown(args, registry.flag, option)}: the {registry.what} {name} has no such option. Leave it out, or set "
                    f"{registry.flag} to {' or '.join(names)}."
                )


def attention_can_run(args: GRPOConfig) -> Iterator[str]:
    if args.attn_implementation == "flash_attention_2" and not flash_attention_can_run(
        args.device.kind, args.device.dtype
    ):
        options = shown(args, "attn_implementation")
        yield f"{options}: flash attention needs an NVIDIA GPU and bfloat16 (--model_dtype). Choose auto or sdpa."


def assumed_memory_is_of_gpus(args: GRPOConfig) -> Iterator[str]:
    if args.gpu_memory is not None and args.device.kind == "cpu":
        yield f"{shown(args, 'gpu_memory', 'device_type')}: on CPU there is no GPU whose memory counts. Leave out one of the two."


def machine_has_room(args: GRPOConfig) -> Iterator[str]:
    """Checks only a single machine. A cluster's room is checked after connecting to the cluster."""
    assumed = args.device.assumed
    if not assumed and (os.environ.get("RAY_ADDRESS") or len(args.num_learners_per_node) > 1):
        return
    names = ("teacher_num_engines", "teacher_tensor_parallel_size") if args.has_teacher else ()
    options = shown(args, "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size", *names)
    needed = num_places_needed(args)
    if assumed and needed > assumed.count:
        turns = "" if args.shares_devices else ", or let engines and learners take turns (--colocate)"
        gpus = counted(needed, "GPU")
        yield f"{shown(args, 'num_gpus')}: the run needs {gpus}, for {options}. Give more, ask for fewer{turns}."
    elif needed > args.device.num_places:
        yield (
            f"{options}: {counted(needed, 'worker')}, and this machine has room for {args.device.num_places} "
            f"({places_explained(args.device)}). Ask for fewer, or set RAY_ADDRESS to the cluster that has more."
        )


def workflow_can_use_the_options(args: GRPOConfig) -> Iterator[str]:
    yield from WORKFLOWS[args.rollout_workflow].value.mistakes(args)


RULES: tuple[Callable[[GRPOConfig], Iterator[str]], ...] = (
    choices_are_known,
    numbers_are_within_limits,
    every_node_has_learners,
    learners_form_whole_groups,
    loss_denominator_is_known,
    staleness_bounds_are_in_order,
    one_option_says_how_far_ahead,
    over_issuing_has_room,
    weights_are_sent_within_the_threshold,
    truncation_has_fresh_tokens,
    streaming_has_one_update_a_step,
    queue_holds_a_step,
    one_old_policy,
    rho_bounds_are_in_order,
    options_have_an_effect,
    the_receiver_of_traces_has_an_address,
    rewards_fit_the_advantage,
    old_keys_are_kept_or_computed_again,
    parts_know_their_denominators,
    active_sampling_has_something_to_replace,
    the_reference_that_moves_is_there,
    remapped_verifiers_are_pairs,
    reward_functions_are_apart,
    reward_functions_fit_the_workflow,
    jail_of_reward_functions_is_there,
    something_is_rewarded,
    evolving_rubrics_have_a_model,
    judgements_have_a_price,
    teacher_has_something_to_say,
    overlong_buffer_fits,
    alerts_are_limits,
    stop_strings_are_not_empty,
    pack_holds_a_sample,
    kl_has_its_reference,
    groups_have_something_to_compare,
    episodes_fill_a_step,
    mini_batches_are_not_empty,
    options_have_their_entry,
    own_losses_can_be_computed,
    own_advantage_can_be_computed,
    workflow_can_use_the_options,
    evaluation_sets_can_be_read,
    evaluation_has_data_and_a_time,
    evaluated_responses_differ,
    engines_sample_at_the_temperature,
    system_prompt_file_can_be_read,
    outputs_can_be_written,
    checkpoints_and_models_have_their_own_names,
    single_gpu_has_one_of_each,
    turns_have_an_order,
    weight_transport_fits,
    engine_arguments_are_free,
    colocated_engines_fit,
    attention_can_run,
    assumed_memory_is_of_gpus,
    machine_has_room,
    model_can_be_read,
    model_family_can_be_trained,
    model_has_enough_positions,
    rows_can_be_divided,
    layers_can_be_compiled,
    layers_can_compute_again,
    engines_can_divide_heads,
    adapters_have_layers,
    teacher_fits_the_model,
)
