"""A start in a directory whose run left no checkpoint: the files of that run move to a folder of their own.

    out/metrics.jsonl, out/transcripts/, …  ──►  out/earlier_1/metrics.jsonl, out/earlier_1/transcripts/, …

So the files of two runs are never mixed, and nothing is lost. Files that no run writes stay where they are. So does a model or a
file that the new run reads.
"""

import os
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_fields
from open_instruct.report.component_log import LOG_FILE
from open_instruct.report.metrics_file import STEP_KEY, read_metrics
from open_instruct.report.run_log import COMPLETIONS_DIRECTORY, METRICS_FILE, PLOT_FILE, PROMPTS_FILE, SUMMARY_FILE
from open_instruct.report.tracker import EARLIER
from open_instruct.run.options_file import OPTIONS_FILES
from open_instruct.run.run_saving import MODEL, checkpoint_store

RESULTS = (
    *(METRICS_FILE, PROMPTS_FILE, SUMMARY_FILE, PLOT_FILE, COMPLETIONS_DIRECTORY),
    *("transcripts", "samples", "rollouts", MODEL, "step_" + "[0-9]" * 6),
)
"""Names and patterns of what a run leaves in its directory. A directory without any of it holds no earlier run."""
ACCOMPANIMENT = "logs", LOG_FILE, OPTIONS_FILES
"""What moves together with results. After a start that failed at once there is nothing else, and it stays."""


def set_aside(args: GRPOConfig) -> str:
    """Move the files of an earlier run aside if the run does not resume from its checkpoint. Returns what was done, as a sentence
    for the log; "" if there was nothing to do.

    Raises:
        OSError: a file cannot be moved.
    """
    if checkpoint_store(args).newest() is not None:
        return ""
    directory = Path(args.output_dir)
    inputs = set(_inputs(args))
    found = [path for path in _matching(directory, RESULTS) if _holds_something(path)]
    if not found:
        return ""
    last_step = _last_step(directory / METRICS_FILE)
    entries = [*_matching(directory, RESULTS), *_matching(directory, ACCOMPANIMENT)]
    moved = [path for path in entries if not _is_read(path, inputs)]
    if not moved:
        return ""
    earlier = _new_folder(directory)
    for path in moved:
        path.rename(earlier / path.name)
    kept = [path.name for path in entries if path not in moved]
    elsewhere = _move_rollouts(args)
    return (
        f"no checkpoint in {args.state_dir}, so the run begins anew at step 1. The files of the run that was in "
        f"{directory} before ({last_step}{', '.join(path.name for path in moved)}) are in {earlier} now"
        + (f", its rollouts in {elsewhere}" if elsewhere else "")
        + (f"; {', '.join(kept)} stays, because this run reads it" if kept else "")
    )


def _move_rollouts(args: GRPOConfig) -> Path | None:
    """Move the earlier run's rollouts within `--rollouts_save_path`, where other runs may have theirs. Returns the folder."""
    if args.rollouts_save_path is None:
        return None
    directory = Path(args.rollouts_save_path)
    rollouts = [
        path for kind in ("rollouts_*", "metadata") for path in directory.glob(f"{escape(args.run_title)}_{kind}.jsonl")
    ]
    if not rollouts:
        return None
    earlier = _new_folder(directory)
    for path in rollouts:
        path.rename(earlier / path.name)
    return earlier


def _matching(directory: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(directory.glob(pattern))


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


def _last_step(path: Path) -> str:
    try:
        steps = [row[STEP_KEY] for row in read_metrics(path)]
    except OSError:
        return ""
    return f"up to step {max(steps)}: " if steps else ""


def _inputs(args: GRPOConfig) -> Iterator[Path]:
    """The files and directories that the options name, other than the run's own directories."""
    outputs = "output_dir", "checkpoint_state_dir", "rollouts_save_path"
    for option in option_fields(type(args)):
        value = getattr(args, option.name)
        for text in value if isinstance(value, list) else [value]:
            if option.name not in outputs and isinstance(text, str) and text and os.path.exists(text):
                yield Path(text).resolve()


def _is_read(path: Path, inputs: set[Path]) -> bool:
    """Whether an input is this path or inside it."""
    place = path.resolve()
    return any(place == one or place in one.parents for one in inputs)


def _new_folder(directory: Path) -> Path:
    number = 1
    while (folder := directory / f"{EARLIER}{number}").exists():
        number += 1
    folder.mkdir()
    return folder
