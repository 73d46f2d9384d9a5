"""Draws the held-out accuracy of runs that differ by their seed, and their mean training reward, into one picture.

python scripts/plot_seeds.py docs/images/smollm2_curve.png out/seed1 out/seed2 out/seed3
"""

import argparse
import json
from pathlib import Path

import numpy as np

from open_instruct.report.accuracies import ACCURACY_KEY
from open_instruct.report.metrics_file import STEP_KEY, read_metrics
from open_instruct.report.plots import REWARD_KEY, SET_COLORS, picture
from open_instruct.report.run_log import METRICS_FILE
from open_instruct.run.options_file import OPTIONS_FILE


def seed_of(run: Path) -> int:
    return json.loads((run / OPTIONS_FILE).read_text())["in_force"]["seed"]


def draw(runs: list[Path], path: Path) -> None:
    metrics = [list(read_metrics(run / METRICS_FILE)) for run in runs]
    rewards = [[row[REWARD_KEY] for row in rows if row.get(REWARD_KEY) is not None] for rows in metrics]
    num_steps = min(map(len, rewards))
    with picture(path) as (figure, axes):
        mean = np.mean([values[:num_steps] for values in rewards], axis=0)
        axes.plot(range(1, num_steps + 1), mean, color="#93c5fd", label=f"training reward, mean of {len(runs)} seeds")
        for number, (run, rows) in enumerate(zip(runs, metrics, strict=True)):
            points = [(row[STEP_KEY], row[ACCURACY_KEY]) for row in rows if row.get(ACCURACY_KEY) is not None]
            label = f"held-out accuracy, seed {seed_of(run)}"
            axes.plot(*zip(*points, strict=True), color=SET_COLORS[number % len(SET_COLORS)], marker="o", label=label)
        axes.set_xlabel("training step")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write, .png")
    parser.add_argument("runs", type=Path, nargs="+", help="output directories")
    args = parser.parse_args()
    draw(args.runs, args.picture)


if __name__ == "__main__":
    main()
