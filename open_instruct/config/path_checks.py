"""Checks that the files and directories that a run names can be read and written, and that its addresses are some."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown


def system_prompt_file_can_be_read(args: GRPOConfig) -> Iterator[str]:
    path = args.system_prompt_override_file
    if path is None:
        return
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        yield f"{shown(args, 'system_prompt_override_file')}: there is no readable file. Check path and permissions."
        return
    try:
        Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        yield f"{shown(args, 'system_prompt_override_file')}: it cannot be read ({reason}). Give a file of UTF-8 text."


def checkpoints_and_models_have_their_own_names(args: GRPOConfig) -> Iterator[str]:
    """Checkpoints and models are both named after their step, so in one directory a model would replace the checkpoint."""
    state_dir = args.checkpoint_state_dir
    if state_dir is None or args.save_freq <= 0 or os.path.realpath(state_dir) != os.path.realpath(args.output_dir):
        return
    yield (
        f"{shown(args, 'checkpoint_state_dir', 'output_dir', 'save_freq')}: the model and the checkpoint of a step would have "
        f"the same name there, and the model would replace the checkpoint. Leave out checkpoint_state_dir, give another one, or "
        f"set save_freq to -1."
    )


def outputs_can_be_written(args: GRPOConfig) -> Iterator[str]:
    for name in ("output_dir", "checkpoint_state_dir", "rollouts_save_path", "cache_evolving_rubric_data_dir"):
        if (path := getattr(args, name)) is None:
            continue
        if name == "output_dir" and not path:
            yield f"{shown(args, name)}: an empty path, which would be the current directory. Name a directory."
            continue
        absolute = Path(path).absolute()
        first_existing = next(parent for parent in (absolute, *absolute.parents) if os.path.exists(parent))
        if not first_existing.is_dir():
            yield f"{shown(args, name)}: {first_existing} is a file. Give a directory."
        elif not os.access(first_existing, os.W_OK | os.X_OK):
            yield f"{shown(args, name)}: {first_existing} cannot be written to. Give another directory."


def the_receiver_of_traces_has_an_address(args: GRPOConfig) -> Iterator[str]:
    if args.otlp_traces_endpoint is None:
        return
    try:
        parts = urlsplit(args.otlp_traces_endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        options = shown(args, "otlp_traces_endpoint")
        yield f"{options}: no address. Give one such as http://localhost:4317, or http://localhost:4318/v1/traces."
