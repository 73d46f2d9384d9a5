"""A start in a directory whose run left no checkpoint: the files of that run move to a folder of their own.

    out/metrics.jsonl, out/transcripts/, …  ──►  out/earlier_1/metrics.jsonl, out/earlier_1/transcripts/, …

So the files of two runs are never mixed, and nothing is lost. Files that no run writes stay where they are, also in folders that
a run writes to. So does a model or a file that the new run reads.
"""

import os
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.record.places import RECORD
from open_instruct.registry import option_fields
from open_instruct.report.component_log import LOG_FILE
from open_instruct.report.metrics_file import STEP_KEY, read_metrics
from open_instruct.report.run_log import COMPLETIONS_DIRECTORY, METRICS_FILE, PLOT_FILE, PROMPTS_FILE, SUMMARY_FILE
from open_instruct.report.tracker import EARLIER, begin_another_run_at
from open_instruct.run.options_file import OPTIONS_FILE
from open_instruct.run.run_saving import MODEL, checkpoint_store

NUMBER = "[0-9]" * 6
SIGNS = METRICS_FILE, PROMPTS_FILE, OPTIONS_FILE
"""Files that every run begins with. A directory without any of them holds no earlier run."""
RESULTS = (
    *(METRICS_FILE, PROMPTS_FILE, SUMMARY_FILE, PLOT_FILE),
    *(f"{COMPLETIONS_DIRECTORY}/step_{NUMBER}.jsonl", f"transcripts/step_{NUMBER}.txt", f"samples/step_{NUMBER}.jsonl"),
    *(f"rollouts/*_rollouts_{NUMBER}.jsonl", "rollouts/*_metadata.jsonl"),
    *(f"{RECORD}/steps/{NUMBER}.parquet", f"{RECORD}/open/{NUMBER}.log", f"{RECORD}/evaluations/{NUMBER}_*.parquet"),
)
"""Patterns of the files with results that a run leaves in its directory. After a start that failed at once there is none."""
MODELS = MODEL, f"step_{NUMBER}"
"""Patterns of the directories that a run saves models in. They are of a run only if it has trained a step."""
ACCOMPANIMENT = (
    *("logs/driver.log", LOG_FILE, OPTIONS_FILE, "options_[0-9]*.json", "tensorboard"),
    *(f"{RECORD}/{name}" for name in ("record.json", "starts.jsonl", "events.jsonl", "prompts.jsonl", "undone")),
)
"""What moves together with results, and stays without them."""


def set_aside(args: GRPOConfig) -> str:
    """Move the files of an earlier run aside if the run does not resume from its checkpoint. Returns what was done, as a sentence
    for the log; "" if there was nothing to do.

    Raises:
        OSError: a file cannot be moved.
    """
    directory = Path(args.output_dir)
    if checkpoint_store(args).newest() is not None or not any((directory / name).is_file() for name in SIGNS):
        return ""
    last_step = _last_step(directory / METRICS_FILE)
    results = [*_matching(directory, RESULTS), *(_matching(directory, MODELS) if last_step is not None else [])]
    if not any(map(_holds_something, results)):
        return ""
    entries = [*results, *_matching(directory, ACCOMPANIMENT)]
    inputs = set(_inputs(args))
    movables = [path for path in entries if not _is_read(path, inputs, directory)]
    if not movables:
        return ""
    begin_another_run_at(directory)  # first, so that a run that ends in between leaves no two runs with the same id
    earlier = _new_folder(directory)
    for path in movables:
        _move(path, directory, earlier)
    inputs_here = [str(path.relative_to(directory)) for path in entries if path not in movables]
    folder_of_rollouts = _move_rollouts(args)
    reached = "" if last_step is None else f"up to step {last_step}: "
    return (
        f"no checkpoint in {args.state_dir}, so the run begins anew at step 1. The files of the run that was in "
        f"{directory} before ({reached}{', '.join(_names_in(directory, movables))}) are in {earlier} now"
        + (f", its rollouts in {folder_of_rollouts}" if folder_of_rollouts else "")
        + (f"; {', '.join(inputs_here)} stays, because this run reads it" if inputs_here else "")
    )


def _move(path: Path, directory: Path, earlier: Path) -> None:
    """Move an entry of the directory to the same place in `earlier`, and remove folders that are empty after that."""
    to = earlier / path.relative_to(directory)
    to.parent.mkdir(parents=True, exist_ok=True)
    path.rename(to)
    for folder in path.parents:
        if folder == directory or any(folder.iterdir()):
            return
        folder.rmdir()


def _names_in(directory: Path, paths: list[Path]) -> list[str]:
    """The names that a listing of the directory shows, each once."""
    return list(dict.fromkeys(path.relative_to(directory).parts[0] for path in paths))


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


def _last_step(path: Path) -> int | None:
    """The last step in the file of metrics; None if it has no row."""
    try:
        return max((row[STEP_KEY] for row in read_metrics(path)), default=None)
    except OSError:
        return None


def _inputs(args: GRPOConfig) -> Iterator[Path]:
    """The files and directories that the options name, other than the run's own directories."""
    outputs = "output_dir", "checkpoint_state_dir", "rollouts_save_path"
    for option in option_fields(type(args)):
        value = getattr(args, option.name)
        for text in value if isinstance(value, list) else [value]:
            if option.name not in outputs and isinstance(text, str) and text and os.path.exists(text):
                yield Path(text).resolve()


def _is_read(path: Path, inputs: set[Path], directory: Path) -> bool:
    """Whether an input is this path, inside it, or a folder of the directory with this path in it."""
    place, folder = path.resolve(), directory.resolve()
    return any(
        place == file or place in file.parents or (file in place.parents and folder in file.parents) for file in inputs
    )


def _new_folder(directory: Path) -> Path:
    number = 1
    while (folder := directory / f"{EARLIER}{number}").exists():
        number += 1
    folder.mkdir()
    return folder
