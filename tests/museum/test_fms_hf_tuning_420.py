"""Unknown options are ignored, and `--flag False` is true."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.config.cli import UsageError, parse_args
from open_instruct.config.grpo_config import GRPOConfig

EXHIBIT = Exhibit(
    reports=("foundation-model-stack/fms-hf-tuning #420", "NVIDIA/OpenSeq2Seq #130"),
    subject="options",
    happened="A misspelt option was dropped in silence and the run went on with the default. A switch that is on by "
    "default could not be turned off, since any text, `False` too, counted as true.",
    here="An unknown option is an error that names the nearest option, before anything starts, and a switch reads what"
    " is written (`config/cli.py`, `config/option_values.py`).",
)
SWITCH = "mask_truncated_completions"


def check(options: Callable[[list[str]], Any]) -> None:
    assert getattr(options([f"--{SWITCH}", "False"]), SWITCH) is False
    assert getattr(options([f"--{SWITCH}", "True"]), SWITCH) is True
    with pytest.raises(UsageError, match="Did you mean --learning_rate"):
        options(["--leerning_rate", "1e-6"])


def theirs(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{SWITCH}", type=bool, default=True)
    return parser.parse_known_args(argv)[0]


def ours(argv: list[str]) -> GRPOConfig:
    return parse_args(["--model_name_or_path", "a/b", *argv], GRPOConfig)


def test_switch_that_is_never_off_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_options_are_read_or_refused_here() -> None:
    check(ours)
