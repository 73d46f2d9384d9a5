"""How busy engines and learners are, and how old samples get, against the staleness threshold; on a simulated clock.

    python benchmarks/staleness_simulation.py
    python benchmarks/staleness_simulation.py --json out/staleness.json

Drives the real admission, ledger and message queue (see simulator.py). Response lengths have a heavy tail (log-normal, sigma 1,
cut off at eight times the mean); engines and learners are equally fast on average: each waits for the other whenever it can.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import print_table, write_json
from benchmarks.simulator import Simulation, World, log_normal
from open_instruct.staleness import FlowOptions

GROUPS_AT_ONCE = 8
MEAN_LENGTH = 200.0
TOKEN_S = 0.01


def world(num_engines: int, threshold: int, *, streaming: bool, num_steps: int, seed: int) -> World:
    """A batch takes every place of every engine once."""
    prompts = num_engines * GROUPS_AT_ONCE
    mean_s = MEAN_LENGTH * TOKEN_S
    return World(
        flow=FlowOptions(prompts, num_steps, threshold, threshold),
        draw_length=log_normal(MEAN_LENGTH, 1.0, 8 * MEAN_LENGTH),
        num_engines=num_engines,
        groups_at_once=GROUPS_AT_ONCE,
        token_s=TOKEN_S,
        step_s=0.05 * mean_s,
        learner_token_s=0.93 * mean_s / (prompts * MEAN_LENGTH),
        sync_s=0.02 * mean_s,
        streaming=streaming,
        seed=seed,
    )


def measure(num_engines: int, threshold: int, *, streaming: bool, num_steps: int, seeds: range) -> dict[str, Any]:
    """Medians over seeds; the first tenth of the steps, in which the pipeline fills, is left out of the throughput."""
    places = num_engines * GROUPS_AT_ONCE
    shares = []
    ages: list[int] = []
    started = time.process_time()
    for seed in seeds:
        one = world(num_engines, threshold, streaming=streaming, num_steps=num_steps, seed=seed)
        outcome = Simulation(one).run()
        ages += outcome.ages
        first = num_steps // 10
        rate = (num_steps - 1 - first) * places / (outcome.step_ends_s[-1] - outcome.step_ends_s[first])
        mean_s = float(np.mean(outcome.durations_s))
        shares.append(
            (
                outcome.engine_busy_group_s / (places * outcome.makespan_s),
                outcome.learner_busy_s / outcome.makespan_s,
                rate / min(places / mean_s, 1 / (0.07 * mean_s / places + 0.93 * mean_s / places)),
            )
        )
    engine, learner, throughput = np.median(np.array(shares), axis=0)
    return {
        "engines": num_engines,
        "streaming": streaming,
        "threshold_steps": threshold,
        "engine_busy_share": float(engine),
        "learner_busy_share": float(learner),
        "throughput_share_of_capacity": float(throughput),
        "age_mean_steps": float(np.mean(ages)),
        "age_p95_steps": float(np.percentile(ages, 95)),
        "age_max_steps": max(ages),
        "groups": len(ages),
        "simulation_cpu_s": time.process_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 1, 2, 3, 5, 8])
    parser.add_argument("--num_steps", type=int, default=60)
    parser.add_argument("--num_seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for num_engines in args.engines:
        for streaming in (False, True):
            for threshold in args.thresholds:
                steps = args.num_steps if num_engines <= 64 else args.num_steps // 2
                seeds = range(args.num_seeds)
                rows.append(measure(num_engines, threshold, streaming=streaming, num_steps=steps, seeds=seeds))
    print_table(rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
