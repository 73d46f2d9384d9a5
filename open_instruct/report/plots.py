"""The plots of a run: the reward curve of training, and accuracy by cycle in an evaluation of the reasoning cache.

matplotlib is imported when it is first needed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.report.accuracies import EVAL_REWARD_KEY, Accuracies
from open_instruct.report.isolation import Isolation
from open_instruct.report.metrics_file import STEP_KEY, read_metrics

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

REWARD_KEY = "all_groups/scores"
"""Metric: mean reward of all responses that were generated for a training step."""
ERROR_KEY = "all_groups/scores_standard_error"
"""Metric: the standard error of that mean."""
CYCLE_KEY = "eval/rc/accuracy_cycle_"
"""Metrics: share of right answers after each cycle of the reasoning cache. The value after the last cycle is the accuracy."""
SET_COLORS = ("#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#be123c")
EARLIER_COLORS = ("#fdba74", "#a8a29e", "#f472b6", "#84cc16")
MOST_TICKS = 8
"""Most cycles that have a label below them. With 9 to 16 cycles every second cycle has a label, with 17 to 24 every third, …"""


@contextmanager
def picture(path: Path) -> Iterator[tuple["matplotlib.figure.Figure", "matplotlib.axes.Axes"]]:
    """An empty figure with one pair of axes, which is written to `path` when the block ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, because it would keep the figure in memory, and use a window system if there is one.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _as_percentages(axes: "matplotlib.axes.Axes") -> None:
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


# --- training ---------------------------------------------------------------------------------------------------------


def plot_reward_curve(metrics_path: str | Path, png_path: str | Path) -> Path | None:
    """Draw training reward over steps, and eval accuracy at the steps where it was measured, into `png_path`. Each evaluation set
    that is measured by itself has a curve. Where only reward functions score, the reward of evaluations stands in for the
    accuracy.

    Returns the path, or None if there is nothing to draw or drawing failed; a failure is logged as a warning.
    """
    with Isolation("the reward curve"):
        rows = list(read_metrics(metrics_path))
        rewards, accuracies = _series(rows, REWARD_KEY), _accuracies(rows)
        evaluations = [] if accuracies else _series(rows, EVAL_REWARD_KEY)
        if rewards or accuracies or evaluations:
            errors = dict(_series(rows, ERROR_KEY))
            _draw_curves(rewards, errors, accuracies, _earlier_cycles(rows), Path(png_path), evaluations)
            return Path(png_path)
    return None


def _series(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row[STEP_KEY], row[key]) for row in rows if row.get(key) is not None]


def _accuracies(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Points (step, accuracy) of each curve, by its label."""
    curves: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if (accuracies := Accuracies.of(row)) is not None:
            for name, measure in accuracies.by_name.items():
                if measure.share is not None:
                    curves[f"eval {name or 'accuracy'}"].append((row[STEP_KEY], measure.share))
    return dict(curves)


def _earlier_cycles(rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """Points (step, accuracy) after each cycle except the last, by the number of the cycle."""
    numbers = sorted({int(key.removeprefix(CYCLE_KEY)) for row in rows for key in row if key.startswith(CYCLE_KEY)})
    return {number: _series(rows, f"{CYCLE_KEY}{number}") for number in numbers[:-1]}


def _draw_curves(
    rewards: list[tuple[int, float]],
    errors: Mapping[int, float],
    accuracies: dict[str, list[tuple[int, float]]],
    earlier_cycles: dict[int, list[tuple[int, float]]],
    path: Path,
    evaluations: list[tuple[int, float]],
) -> None:
    with picture(path) as (figure, axes):
        axes.set_xlabel("training step")
        if rewards:
            _draw_rewards(axes, rewards, errors)
        if evaluations:
            axes.plot(*zip(*evaluations, strict=True), color="#ea580c", marker="o", label="eval reward")
            axes.autoscale(axis="y")
        if accuracies:
            beside = axes.twinx() if rewards else axes
            _draw_accuracies(beside, accuracies)
            for number, (cycle, values) in enumerate(earlier_cycles.items()):
                color = EARLIER_COLORS[number % len(EARLIER_COLORS)]
                steps, shares = zip(*values, strict=True)
                beside.plot(steps, shares, color=color, linewidth=1, marker=".", label=f"after cycle {cycle}")
        figure.legend(loc="outside upper center", ncols=3, frameon=False)


def _draw_rewards(axes: "matplotlib.axes.Axes", rewards: list[tuple[int, float]], errors: Mapping[int, float]) -> None:
    """The rewards of the steps, each with its standard error where that is known, and their running mean."""
    steps, values = zip(*rewards, strict=True)
    lows = [value - errors.get(step, 0.0) for step, value in rewards]
    highs = [value + errors.get(step, 0.0) for step, value in rewards]
    axes.fill_between(steps, lows, highs, color="#bfdbfe", alpha=0.5, linewidth=0)
    window = max(1, len(values) // 20)
    smooth = [
        sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - window) : end])
    ]
    axes.plot(steps, values, color="#93c5fd", linewidth=1, label="training reward" if window == 1 else "_raw")
    if window > 1:
        axes.plot(steps, smooth, color="#2563eb", linewidth=2, label=f"training reward (mean of {window} steps)")
    axes.set_ylabel("training reward", color="#2563eb")
    # From zero, with the same headroom as the accuracies on the other axis, because on most tasks reward follows accuracy.
    axes.set_ylim(min(0.0, *values) * 1.05, max(*values, 1e-9) * 1.05)


def _draw_accuracies(axes: "matplotlib.axes.Axes", curves: dict[str, list[tuple[int, float]]]) -> None:
    for number, (label, points) in enumerate(curves.items()):
        color = SET_COLORS[number % len(SET_COLORS)]
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, linewidth=1.5, marker="o", markersize=5, label=label)
        for step, value in {points[0], points[-1]}:
            # Keep the text off the curve, which rises from the first point and reaches the last point from below.
            offset = -17 if (step, value) == points[0] and value > 0.1 else 8
            place = {"textcoords": "offset points", "ha": "center", "color": color}
            axes.annotate(f"{value:.1%}", (step, value), (0, offset), **place)
    axes.set_ylabel("eval accuracy", color="#c2410c")
    axes.set_ylim(0, 1.05)
    _as_percentages(axes)


# --- evaluation of the reasoning cache ------------------------------------------------------------------------------


def plot_accuracy_by_cycle(measures: Mapping[str, Any], budgets: Sequence[int], png_path: str | Path) -> Path | None:
    """Draw the measures of `rc.evaluation.evaluate`, for one data set or for all, into `png_path`.

    Returns the path, or None if there is nothing to draw or drawing failed; a failure is logged as a warning.
    """
    with Isolation("the plot of accuracies"):
        if "accuracy_by_cycle" in measures:
            _draw_cycles(measures, budgets, Path(png_path))
            return Path(png_path)
    return None


def _draw_cycles(measures: Mapping[str, Any], budgets: Sequence[int], path: Path) -> None:
    with picture(path) as (figure, axes):
        axes.set_title(f"Accuracy by cycle, {measures['problems']:,} problems")
        if "one_long_turn_by_budget" in measures:
            style = {"color": "#ea580c", "marker": "s", "linestyle": "--", "label": "one long turn, same tokens"}
            _draw_line(axes, budgets, measures["one_long_turn_by_budget"], style)
        style = {"color": "#2563eb", "marker": "o", "label": "reasoning cache"}
        _draw_line(axes, budgets, measures["accuracy_by_cycle"], style)
        _label_axes(axes, budgets)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _draw_line(
    axes: "matplotlib.axes.Axes", budgets: Sequence[int], accuracies: Sequence[float], style: dict[str, Any]
) -> None:
    """If all trajectories stopped before the last cycle, there are fewer accuracies than budgets."""
    axes.plot(budgets[: len(accuracies)], accuracies, linewidth=2, markersize=6, **style)


def _label_axes(axes: "matplotlib.axes.Axes", budgets: Sequence[int]) -> None:
    stride = -(-len(budgets) // MOST_TICKS)
    ticks = [(cycle, budget) for cycle, budget in enumerate(budgets, start=1) if (cycle - 1) % stride == 0]
    axes.set_xticks([budget for _, budget in ticks], [f"cycle {cycle}\n{budget:,}" for cycle, budget in ticks])
    axes.set_xlabel("tokens that may have been spent")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.02, 1.05)  # a little more than 0 to 1, so that points on the edge are visible as a whole
    _as_percentages(axes)
