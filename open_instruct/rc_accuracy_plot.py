"""A picture of an evaluation: accuracy by cycle, and that of one long turn with the same tokens.

matplotlib is imported when first needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.logger_utils import Isolation

if TYPE_CHECKING:
    import matplotlib.axes

MOST_TICKS = 8
"""Cycles that have their tokens written below them; of more, every other, every third, …"""


def plot_accuracy_by_cycle(measures: Mapping[str, Any], budgets: Sequence[int], png_path: str | Path) -> Path | None:
    """Draw the measures of `rc_evaluation.evaluate`, those of one data set or of all, into `png_path`.

    Returns the path, or None when there was nothing to draw or drawing failed, which is warned of.
    """
    with Isolation("the plot of accuracies"):
        if "accuracy_by_cycle" in measures:
            _draw(measures, budgets, Path(png_path))
            return Path(png_path)
    return None


def _draw(measures: Mapping[str, Any], budgets: Sequence[int], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would keep the figure, and pick a window system where there is one.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(f"Accuracy by cycle, {measures['problems']:,} problems")
    if "one_long_turn_by_budget" in measures:
        style = {"color": "#ea580c", "marker": "s", "linestyle": "--", "label": "one long turn, same tokens"}
        _draw_line(axes, budgets, measures["one_long_turn_by_budget"], style)
    style = {"color": "#2563eb", "marker": "o", "label": "reasoning cache"}
    _draw_line(axes, budgets, measures["accuracy_by_cycle"], style)
    _label_axes(axes, budgets)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_line(
    axes: "matplotlib.axes.Axes", budgets: Sequence[int], accuracies: Sequence[float], style: dict[str, Any]
) -> None:
    """All trajectories may have stopped before the last cycle: then there are fewer accuracies than budgets."""
    axes.plot(budgets[: len(accuracies)], accuracies, linewidth=2, markersize=6, **style)


def _label_axes(axes: "matplotlib.axes.Axes", budgets: Sequence[int]) -> None:
    every = -(-len(budgets) // MOST_TICKS)
    ticks = [(cycle, budget) for cycle, budget in enumerate(budgets, start=1) if (cycle - 1) % every == 0]
    axes.set_xticks([budget for _, budget in ticks], [f"cycle {cycle}\n{budget:,}" for cycle, budget in ticks])
    axes.set_xlabel("tokens that may have been spent")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.02, 1.05)  # from zero, and points on the edge are seen whole
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
