"""Options, tokenizer and datasets of a run, all checked before anything starts."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from open_instruct.config.checks import collect_mistakes
from open_instruct.config.cli import UsageError, fail_with, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config, unused_modules
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import with_attention_that_fits
from open_instruct.config.model_support import problem_with_weights
from open_instruct.config.open_instruct_options import ForeignOptions
from open_instruct.data.run_inputs import RunInputs, load_inputs
from open_instruct.engines.vllm_plugin import plugins_are_found
from open_instruct.engines.vllm_tool_parsers import tool_parsers_are_there
from open_instruct.option_text import shown
from open_instruct.registry import option_kinds
from open_instruct.report.metric_names import alerts_are_on_metrics
from open_instruct.report.metrics_endpoint import metrics_port_is_free
from open_instruct.report.trackers import trackers_are_installed
from open_instruct.run.dry_run import dry_run
from open_instruct.run.run_saving import resumes_the_same_run
from open_instruct.system.interruption import tell
from open_instruct.system.secret_masking import masked


def read_options_and_data(argv: Sequence[str]) -> tuple[GRPOConfig, RunInputs]:
    """Options, tokenizer and datasets, all checked; every mistake in one message and exit code 2."""
    inputs: list[RunInputs] = []
    foreign = ForeignOptions()
    try:
        config_cls, mistakes = config_class_with(read_lists(argv, MODULE_OPTIONS, option_kinds(GRPOConfig)))
        args = parse_args(argv, config_cls, validators=[lambda _: mistakes, *validators(inputs)], foreign=foreign)
    except UsageError as error:
        fail_with(error.mistakes)
    if foreign.notes:
        tell(foreign.warning())
    args = settled(args)
    args.command_line = masked([sys.argv[0], *argv])
    return args, loaded_inputs(args, inputs)


def loaded_inputs(args: GRPOConfig, inputs: list[RunInputs]) -> RunInputs:
    """What the checks have loaded. With `--dry_run --gpu_memory` that is nothing, and the program ends here with the answer."""
    if args.device.assumed is not None:
        raise SystemExit(dry_run(args))
    return inputs[0]


def settled(args: GRPOConfig) -> GRPOConfig:
    """Checked options as every process reads them: those of the user's modules as plain values, and attention as the model needs
    it."""
    args, note = with_attention_that_fits(plain_config(args))
    for text in [*unused_modules(args), *([note] if note else [])]:
        tell(text)
    return args


def validators(inputs: list[RunInputs]) -> list[Callable[[GRPOConfig], list[str]]]:
    """The checks before anything starts. The last check puts the data that it loads into `inputs`."""

    def data_is_that_of_the_run(args: GRPOConfig) -> list[str]:
        if args.device.assumed is not None:
            return []
        loaded, mistakes = load_inputs(args)
        inputs.extend([loaded] if loaded else [])
        return mistakes + resumes_the_same_run(args, loaded)

    return [
        collect_mistakes,
        plugins_are_found,
        alerts_are_on_metrics,
        trackers_are_installed,
        metrics_port_is_free,
        weights_are_whole,
        tool_parsers_are_there,
        data_is_that_of_the_run,
    ]


def weights_are_whole(args: GRPOConfig) -> list[str]:
    """What is wrong with the weights of a model in a directory. Files from the hub are checked when they are fetched."""
    if args.device.assumed is not None:
        return []
    directory = Path(args.model_name_or_path)
    problem = problem_with_weights(directory) if os.path.isfile(directory / "config.json") else ""
    return [f"{shown(args, 'model_name_or_path')}: {problem}"] if problem else []
