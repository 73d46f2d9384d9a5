"""The summary at the end of a run: `summary.json` and a table on the terminal. `plots.py` draws the plots."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from open_instruct.report.live_line import format_duration
from open_instruct.report.metrics_file import to_json_value
from open_instruct.storage.atomic_file import write_atomically

FILES_OF_MODELS = "config.json", "adapter_config.json"
"""Files of which a saved model, or an adapter, has one."""
MOST_COLUMNS = 100
"""Longest line above and below a table."""


@dataclass(frozen=True)
class PromptCounts:
    """Outcomes of the training prompts of a run, its resumptions included: issued = consumed + the sum of dropped."""

    issued: int
    consumed: int
    dropped: dict[str, int]
    """Dropped prompts by reason."""
    reissued: int
    """Number of times that a prompt was issued again, which `issued` does not count. A reissue is an event, not an outcome."""


@dataclass(frozen=True)
class SetAccuracy:
    """Accuracies of one evaluation set, 0 to 1."""

    before: float | None
    """Before the first step; None if it was not measured then."""
    after: float | None
    """In its last evaluation; None if there was none."""
    reward_before: float | None = None
    """Mean reward before the first step."""
    reward_after: float | None = None
    """Mean reward in its last evaluation."""


@dataclass(frozen=True)
class RunSummary:
    """Content of `summary.json` and of the table at the end of a run."""

    eval_accuracy_before: float | None
    """Accuracy of the evaluation before the first step (`--eval_on_step_0`), 0 to 1; None if there was none, or if only reward
    functions score."""
    eval_accuracy_after: float | None
    """Accuracy of the last evaluation, 0 to 1; None if there was none, or if it measured only some of the sets."""
    training_steps: int
    wall_seconds: float
    """Seconds from the start of the step loop to the saved model. A resumed run adds to the sum that its checkpoint holds."""
    tokens_per_second: float
    """Sampled training tokens divided by `wall_seconds`."""
    prompts: PromptCounts
    checkpoint: str | None
    plot: str | None
    eval_reward_before: float | None = None
    """Mean reward of the evaluation before the first step; None if there was none."""
    eval_reward_after: float | None = None
    """Mean reward of the last evaluation after a step; None if there was none."""
    eval_sets: dict[str, SetAccuracy] = field(default_factory=dict)
    """Accuracies of the evaluation sets, by name; empty if the run does not measure its sets apart."""
    alarms: dict[str, int] = field(default_factory=dict)
    """For each rule of health that raised an alarm: the first training step of the alarm."""


def write_summary(path: str | Path, summary: "RunSummary | Mapping[str, Any]") -> None:
    """Write `summary.json` as a whole or not at all: the summary of a training run, or that of `RolloutStatistics.summary`."""
    values = asdict(summary) if isinstance(summary, RunSummary) else summary
    write_atomically(path, json.dumps(to_json_value(values), indent=2).encode() + b"\n")


def read_summary(path: str | Path) -> RunSummary:
    """The summary of a training run that `write_summary` wrote."""
    values: dict[str, Any] = json.loads(Path(path).read_text())
    values["prompts"] = PromptCounts(**values["prompts"])
    entries = values.get("eval_sets", {})  # summaries of earlier versions have none
    values["eval_sets"] = {name: SetAccuracy(**accuracies) for name, accuracies in entries.items()}
    return RunSummary(**values)


def format_summary_table(summary: RunSummary) -> str:
    """The table at the end of a run, for a terminal or a job log of any width from 60 columns."""
    return format_table(_summary_rows(summary), ("<", "<"), gap=3)


def format_table(rows: Sequence[Sequence[str]], alignment: Sequence[str], gap: int = 2) -> str:
    """Rows of cells between two lines; `alignment` is `<` or `>` for each column. A row may have fewer cells than the others."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    sides = list(zip(alignment, widths, strict=True))
    lines = [
        "  " + (" " * gap).join(f"{cell:{side}{width}}" for cell, (side, width) in zip(row, sides, strict=False))
        for row in rows
    ]
    lines = [line.rstrip() for line in lines]
    rule = "─" * min(max(len(line) for line in lines) + 2, MOST_COLUMNS)
    return "\n".join([rule, *lines, rule])


def _summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    prompts = summary.prompts
    before, after = summary.eval_accuracy_before, summary.eval_accuracy_after
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(prompts.dropped.items()) if count)
    drops = f"{sum(prompts.dropped.values()):,}" + (f"  ({reasons})" if reasons else "")
    return [
        *(_reward_rows(summary) if before is after is None else []),
        ("eval accuracy before", _format_share(before)),
        ("eval accuracy after", _format_share(after) + _gain(before, after)),
        *((f"  {name}", _change(accuracy)) for name, accuracy in summary.eval_sets.items()),
        ("training steps", f"{summary.training_steps:,}"),
        ("wall time", format_duration(summary.wall_seconds)),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("prompts issued", f"{prompts.issued:,}"),
        ("prompts consumed", f"{prompts.consumed:,}"),
        ("prompts dropped", drops),
        ("prompts reissued", f"{prompts.reissued:,}"),
        ("checkpoint", summary.checkpoint or "none"),
        ("plot", summary.plot or "none"),
        *([("alarms", _alarms(summary.alarms))] if summary.alarms else []),
        *_how_to_chat(summary.checkpoint),
    ]


def _alarms(first_steps: Mapping[str, int]) -> str:
    """`entropy_collapse (step 40), cut_off_answers (step 62)`."""
    return ", ".join(f"{rule} (step {step})" for rule, step in sorted(first_steps.items(), key=lambda item: item[1]))


def _reward_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The evaluations of a run in which only reward functions score."""
    rewards = {"eval reward before": summary.eval_reward_before, "eval reward after": summary.eval_reward_after}
    return [(name, f"{reward:.3f}") for name, reward in rewards.items() if reward is not None]


def _change(accuracy: SetAccuracy) -> str:
    """`12.0% → 40.0%  (+28.0 points)`; where only reward functions score, `reward 0.120 → 0.400`."""
    before, after = accuracy.before, accuracy.after
    if before is None and after is None and accuracy.reward_after is not None:
        start = "not measured" if accuracy.reward_before is None else f"{accuracy.reward_before:.3f}"
        return f"reward {start} → {accuracy.reward_after:.3f}"
    return f"{_format_share(before)} → {_format_share(after)}{_gain(before, after)}"


def _gain(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"  ({(after - before) * 100:+.1f} points)"


def _how_to_chat(checkpoint: str | None) -> list[tuple[str, str]]:
    """The command that talks to the saved model, if a model was saved and not only a checkpoint."""
    if checkpoint is None or not any((Path(checkpoint) / name).is_file() for name in FILES_OF_MODELS):
        return []
    return [("talk to it", f"python -m open_instruct.chat {shlex.quote(checkpoint)}")]


def _format_share(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"
