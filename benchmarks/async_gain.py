"""What overlapping generation and training is worth: the same work, synchronously, streamed, and one to three steps ahead.

    python benchmarks/async_gain.py
    python benchmarks/async_gain.py --json out/async_gain.json --num_rounds 5

Response lengths have a heavy tail (log-normal, sigma 1, the same for the same prompt in every row), and sizes are such that
generation and training cost about the same. The engine and the learner have one core each in every row; the learning rate is 0,
so all rows do the same work. Rounds go through the modes in turns. Times are means over the steps after the warm-up, then medians
over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import print_table, write_json

ROOT = Path(__file__).resolve().parents[1]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=8000&seed=7"
NUM_WARM_UP = 4
MODES: dict[str, dict[str, Any]] = {
    "async_steps 0": {"async_steps": 0},
    "streaming 0": {"async_steps": 0, "streaming": True},
    "streaming 1": {"async_steps": 1, "streaming": True},
    "streaming 3": {"async_steps": 3, "streaming": True},
}


def options(args: argparse.Namespace, mode: str, output_dir: Path) -> list[str]:
    values = {
        "model_name_or_path": ROOT / "assets" / "tiny_model",
        "num_unique_prompts_rollout": args.num_prompts,
        "num_samples_per_prompt_rollout": args.num_samples,
        "response_length": args.response_length,
        "max_prompt_token_length": 64,
        "pack_length": args.pack_length,
        "total_episodes": args.num_prompts * args.num_samples * (NUM_WARM_UP + args.num_steps),
        "learning_rate": 0.0,
        "filter_zero_std_samples": False,
        "beta": 0.0,
        "load_ref_policy": False,
        "vllm_enforce_eager": True,
        "vllm_max_num_seqs": args.num_prompts * args.num_samples,
        "checkpoint_state_freq": -1,
        "save_freq": -1,
        "seed": 1,
        "output_dir": output_dir,
        **MODES[mode],
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*flags, "--dataset_mixer_list", SUMS, "1.0"]


def one_run(words: list[str]) -> int:
    """In a process of its own: the loop of both programs, with lengths and cores set."""
    from benchmarks.heavy_tail import HeavyTailRollouter, PinnedTrainer
    from open_instruct import grpo_fast

    args, inputs = grpo_fast.read_options_and_data(words)
    return grpo_fast.run(args, inputs, grpo_fast.Roles(trainer=PinnedTrainer, rollouter=HeavyTailRollouter))


def measure(args: argparse.Namespace, mode: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        words = options(args, mode, Path(directory) / "out")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--one", *words]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, timeout=1800
        )
        lines = (Path(directory) / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][NUM_WARM_UP:]
    return {
        # a mean, because a step ahead makes short and long steps take turns
        "step_s": statistics.fmean(row["time/total"] for row in rows),
        "engine_idle_share": 1 - statistics.fmean(row["engines/busy_share"] for row in rows),
        "learner_idle_share": 1
        - sum(row["time/learner_compute"] for row in rows) / sum(row["time/total"] for row in rows),
        "training_s": statistics.fmean(row["time/learner_compute"] for row in rows),
        "age_mean_steps": statistics.fmean(row["avg_sample_age"] for row in rows),
        "age_max_steps": max(row["max_sample_age"] for row in rows),
        "tokens_per_s": sum(row["val/num_step_response_tokens"] for row in rows)
        / sum(row["time/total"] for row in rows),
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        raise SystemExit(one_run(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--response_length", type=int, default=384)
    parser.add_argument("--pack_length", type=int, default=2048)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    for number in range(args.num_rounds):
        for mode in args.modes:
            found[mode].append(measure(args, mode))
            print(f"round {number + 1}, {mode}: {found[mode][-1]['step_s']:.2f} s a step", file=sys.stderr, flush=True)
    rows = []
    for mode, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        steps = [run["step_s"] for run in runs]
        speedups = [first["step_s"] / run["step_s"] for first, run in zip(found[args.modes[0]], runs, strict=True)]
        spread = {"step_s_min": min(steps), "step_s_max": max(steps), "speedup": statistics.median(speedups)}
        rows.append({"mode": mode, **medians, **spread, "rounds": len(runs)})
    print_table(rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
