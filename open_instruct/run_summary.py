"""What a run says at its end: `summary.json`, the table, the reward curve. matplotlib is imported when first needed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.logger_utils import (
    STEP_KEY,
    Isolation,
    format_duration,
    read_metrics,
    to_json_value,
    write_atomically,
)

if TYPE_CHECKING:
    import matplotlib.axes

REWARD_KEY = "scores"
"""Metric: mean reward of a training batch."""
ACCURACY_KEY = "eval/pass_at_1"
"""Metric: share of right answers in an evaluation, 0 to 1."""
CYCLE_KEY = "eval/rc/accuracy_cycle_"
"""Metrics: the same after each cycle of a reasoning-cache rollout; that of the last is `ACCURACY_KEY`."""


EARLIER_COLORS = ("#fdba74", "#a8a29e", "#f472b6", "#84cc16")


@dataclass(frozen=True)
class PromptCounts:
    """Fates of the training prompts of a run, its resumptions included: issued = consumed + the sum of dropped."""

    issued: int
    consumed: int
    dropped: dict[str, int]
    """By reason."""
    reissued: int
    """Times that a prompt was issued again; an event, not a fate."""


@dataclass(frozen=True)
class RunSummary:
    """What `summary.json` and the table at the end of a run say."""

    eval_accuracy_before: float | None
    """Of the first evaluation, 0 to 1; None without one."""
    eval_accuracy_after: float | None
    training_steps: int
    wall_seconds: float
    tokens_per_second: float
    """Sampled training tokens over the wall time of the step loop."""
    prompts: PromptCounts
    checkpoint: str | None
    plot: str | None


def write_summary(path: str | Path, summary: RunSummary) -> None:
    """Write `summary.json`, whole or not at all."""
    write_atomically(path, json.dumps(to_json_value(asdict(summary)), indent=2).encode() + b"\n")


def read_summary(path: str | Path) -> RunSummary:
    """What `write_summary` wrote."""
    values: dict[str, Any] = json.loads(Path(path).read_text())
    values["prompts"] = PromptCounts(**values["prompts"])
    return RunSummary(**values)


def format_summary_table(summary: RunSummary) -> str:
    """The table at the end of a run, for a terminal or a job log of any width from 60 columns."""
    rows = _summary_rows(summary)
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}   {value}" for label, value in rows]
    rule = "─" * min(max(len(line) for line in lines) + 2, 100)
    return "\n".join([rule, *lines, rule])


def _summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    prompts = summary.prompts
    before, after = summary.eval_accuracy_before, summary.eval_accuracy_after
    gain = "" if before is None or after is None else f"  ({(after - before) * 100:+.1f} points)"
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(prompts.dropped.items()) if count)
    dropped = f"{sum(prompts.dropped.values()):,}" + (f"  ({reasons})" if reasons else "")
    return [
        ("eval accuracy before", _format_share(before)),
        ("eval accuracy after", _format_share(after) + gain),
        ("training steps", f"{summary.training_steps:,}"),
        ("wall time", format_duration(summary.wall_seconds)),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("prompts issued", f"{prompts.issued:,}"),
        ("prompts consumed", f"{prompts.consumed:,}"),
        ("prompts dropped", dropped),
        ("prompts reissued", f"{prompts.reissued:,}"),
        ("checkpoint", summary.checkpoint or "none"),
        ("plot", summary.plot or "none"),
    ]


def _format_share(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def plot_reward_curve(metrics_path: str | Path, png_path: str | Path) -> Path | None:
    """Draw training reward over steps, and eval accuracy where it was measured, into `png_path`.

    Returns the path, or None when there was nothing to draw or drawing failed, which is warned of.
    """
    with Isolation("the reward curve"):
        rows = list(read_metrics(metrics_path))
        rewards, accuracies = _series(rows, REWARD_KEY), _series(rows, ACCURACY_KEY)
        if rewards or accuracies:
            _draw_curves(rewards, accuracies, _earlier_cycles(rows), Path(png_path))
            return Path(png_path)
    return None


def _series(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row[STEP_KEY], row[key]) for row in rows if row.get(key) is not None]


def _earlier_cycles(rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """Accuracy after each cycle but the last, by its number."""
    numbers = sorted({int(key.removeprefix(CYCLE_KEY)) for row in rows for key in row if key.startswith(CYCLE_KEY)})
    return {number: _series(rows, f"{CYCLE_KEY}{number}") for number in numbers[:-1]}


def _draw_curves(
    rewards: list[tuple[int, float]],
    accuracies: list[tuple[int, float]],
    earlier_cycles: dict[int, list[tuple[int, float]]],
    path: Path,
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would keep the figure, and pick a window system where there is one.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("training step")
    if rewards:
        _draw_rewards(axes, rewards)
    if accuracies:
        beside = axes.twinx() if rewards else axes
        _draw_accuracies(beside, accuracies)
        for number, (cycle, values) in enumerate(earlier_cycles.items()):
            color = EARLIER_COLORS[number % len(EARLIER_COLORS)]
            beside.plot(*zip(*values, strict=True), color=color, linewidth=1, marker=".", label=f"after cycle {cycle}")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_rewards(axes: "matplotlib.axes.Axes", rewards: list[tuple[int, float]]) -> None:
    steps, values = zip(*rewards, strict=True)
    window = max(1, len(values) // 20)
    smooth = [
        sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - window) : end])
    ]
    axes.plot(steps, values, color="#93c5fd", linewidth=1, label="training reward" if window == 1 else "_raw")
    if window > 1:
        axes.plot(steps, smooth, color="#2563eb", linewidth=2, label=f"training reward (mean of {window} steps)")
    axes.set_ylabel("training reward", color="#2563eb")
    # One reward is one right answer on most tasks: from zero, with the same headroom as the accuracies beside it.
    axes.set_ylim(min(0.0, *values) * 1.05, max(*values, 1e-9) * 1.05)


def _draw_accuracies(axes: "matplotlib.axes.Axes", accuracies: list[tuple[int, float]]) -> None:
    steps, values = zip(*accuracies, strict=True)
    axes.plot(steps, values, color="#ea580c", linewidth=1.5, marker="o", markersize=5, label="eval accuracy")
    for step, value in {accuracies[0], accuracies[-1]}:
        # Off the curve: it rises from the first point, and comes to the last from below.
        offset = -17 if (step, value) == accuracies[0] and value > 0.1 else 8
        axes.annotate(
            f"{value:.1%}", (step, value), (0, offset), textcoords="offset points", ha="center", color="#c2410c"
        )
    axes.set_ylabel("eval accuracy", color="#c2410c")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
