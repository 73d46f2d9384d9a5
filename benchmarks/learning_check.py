"""Does every policy loss learn, and does a model learn from a teacher? The demo's task, one step behind, with the correction.

Each step is four updates, because with a single one the ratio is 1 and all losses of one denominator take the same step.

    python benchmarks/learning_check.py --out out/learning_check               all losses, 60 steps each
    python benchmarks/learning_check.py --out out/learning_check --losses gspo sapo
    python benchmarks/learning_check.py --out out/learning_check --plot docs/images/losses.png
    python benchmarks/learning_check.py --out out/learning_check --teacher out/learning_check/dapo_1/model

A run that is complete in `--out` is not made again, so that a check that was broken off goes on where it was.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import print_table, write_json  # noqa: E402
from open_instruct.algorithms.losses import LOSSES  # noqa: E402

RESPONSES_PER_STEP = 256  # of cpu_demo.sh


def ways(args: argparse.Namespace) -> dict[str, list[str]]:
    """The options of each way of learning, by its name: the losses or, with a teacher, the teacher alone and with rewards."""
    if args.teacher is None:
        return {loss: ["--loss_fn", loss] for loss in args.losses}
    teacher = ["--teacher_model_name_or_path", args.teacher]
    return {
        "reverse_kl": [*teacher, "--use_task_rewards", "False"],
        "forward_kl": [*teacher, "--use_task_rewards", "False", "--distillation_loss", "forward_kl"],
        "reverse_kl_and_rewards": teacher,
    }


def run(way: str, own: Sequence[str], args: argparse.Namespace, seed: int) -> Path:
    """One run of the demo; returns its directory."""
    directory = Path(args.out) / f"{way}_{seed}"
    if not (directory / "summary.json").exists():
        words = ["bash", str(ROOT / "scripts/train/debug/cpu_demo.sh"), *own, "--seed", str(seed)]
        words += [
            "--num_mini_batches",
            "4",
            "--async_steps",
            "1",
            "--total_episodes",
            str(RESPONSES_PER_STEP * args.steps),
        ]
        words += ["--local_eval_every", str(args.steps), "--output_dir", str(directory)]
        subprocess.run(words, check=True)
    return directory


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def measures(way: str, directories: Sequence[Path]) -> dict[str, Any]:
    """Evaluation accuracy before and after, and the spread of the latter over the seeds."""
    summaries = [json.loads((directory / "summary.json").read_text()) for directory in directories]
    after = sorted(summary["eval_accuracy_after"] for summary in summaries)
    rows = [row for directory in directories for row in rows_of(directory) if row["training_step"] > 0]
    return {
        "run": way,
        "denominator": LOSSES[way if way in LOSSES.names else "dapo"].facts.get("denominator", "token"),
        "before": summaries[0]["eval_accuracy_before"],
        "after": after[len(after) // 2],
        "lowest": after[0],
        "highest": after[-1],
        "clipped": sum(row.get("policy/clipfrac_avg", 0.0) for row in rows) / len(rows),
        "seeds": len(after),
    }


def plot(runs: dict[str, list[Path]], path: str) -> None:
    """The share of right answers among the training responses, per step: the mean over the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for way, directories in runs.items():
        curves = [
            [
                row["all_groups/objective/verifiable_solved_rate"]
                for row in rows_of(directory)
                if row["training_step"] > 0
            ]
            for directory in directories
        ]
        axes.plot(
            range(1, len(curves[0]) + 1),
            [sum(column) / len(column) for column in zip(*curves, strict=True)],
            label=way,
        )
    axes.set(xlabel="training step", ylabel="right answers in training", ylim=(0, None))
    axes.legend(ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory of the runs")
    parser.add_argument("--losses", nargs="+", default=LOSSES.names, choices=LOSSES.names)
    parser.add_argument("--teacher", help="model that teaches the demo's model, in place of the losses")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", help="file for the table")
    parser.add_argument("--plot", help="file for the curves")
    args = parser.parse_args()
    runs: dict[str, list[Path]] = {way: [] for way in ways(args)}
    for seed in args.seeds:
        for way, own in ways(args).items():
            runs[way].append(run(way, own, args, seed))
    table = [measures(way, directories) for way, directories in runs.items()]
    print_table(table)
    write_json(args.json, table)
    if args.plot:
        plot(runs, args.plot)
    if any(row["lowest"] <= row["before"] for row in table):
        sys.exit("one of them did not learn")


if __name__ == "__main__":
    main()
