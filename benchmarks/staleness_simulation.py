"""How busy engines and learners are, and how old samples get, against the staleness threshold; on a simulated clock.

    python benchmarks/staleness_simulation.py
    python benchmarks/staleness_simulation.py --json out/staleness.json

Drives the real admission, ledger and message queue (see simulator.py). Response lengths have a heavy tail (log-normal, sigma 1,
cut off at eight times the mean), a batch takes every place of every engine once, and engines and learners are equally fast on
average: each waits for the other whenever it can. With over-issuing, the bound is one step above the threshold.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import print_table, write_json
from benchmarks.simulated_world import World, log_normal
from benchmarks.simulator import Simulation
from open_instruct.rollouts.staleness import FlowOptions

GROUPS_AT_ONCE = 8
MEAN_LENGTH = 200.0
TOKEN_S = 0.01
GROUPS_PER_RUN = 40_000
"""At least about so many are generated for a row, over all of its seeds."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    num_engines: int
    threshold: int
    streaming: bool
    over_issued_share: float = 0.0

    @property
    def prompts_per_step(self) -> int:
        return self.num_engines * GROUPS_AT_ONCE

    def world(self, num_steps: int, seed: int) -> World:
        prompts, mean_s = self.prompts_per_step, MEAN_LENGTH * TOKEN_S
        over_issued = int(self.over_issued_share * prompts)
        bound = self.threshold + (over_issued > 0)
        return World(
            flow=FlowOptions(prompts, num_steps, self.threshold, bound, over_issued),
            draw_length=log_normal(MEAN_LENGTH, 1.0, 8 * MEAN_LENGTH),
            num_engines=self.num_engines,
            groups_at_once=GROUPS_AT_ONCE,
            token_s=TOKEN_S,
            step_s=0.05 * mean_s,
            learner_token_s=0.93 * TOKEN_S / prompts,
            sync_s=0.02 * mean_s,
            streaming=self.streaming,
            seed=seed,
        )


def cases(engines: list[int], thresholds: list[int]) -> Iterator[Case]:
    for num_engines in engines:
        for streaming in (False, True):
            for threshold in thresholds:
                yield Case(num_engines, threshold, streaming)
        for threshold in thresholds:
            if threshold > 0:
                yield Case(num_engines, threshold, streaming=True, over_issued_share=0.25)


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """Shares and rates are means over the steps that are neither the first tenth, in which the pipeline fills, nor the last, in
    which nothing more is issued."""
    started = time.process_time()
    num_seeds = max(1, round(GROUPS_PER_RUN / (case.prompts_per_step * num_steps)))
    outcomes = [Simulation(case.world(num_steps, seed)).run() for seed in range(num_seeds)]
    window = num_steps // 10, num_steps - 1 - case.threshold
    ages = np.concatenate([outcome.ages for outcome in outcomes])
    capacity = case.prompts_per_step / (float(np.mean(np.concatenate([o.lengths for o in outcomes]))) * TOKEN_S)
    return {
        "engines": case.num_engines,
        "streaming": case.streaming,
        "threshold_steps": case.threshold,
        "over_issued_groups": int(case.over_issued_share * case.prompts_per_step),
        "engine_busy_share": float(np.mean([outcome.engine_share(*window) for outcome in outcomes])),
        "learner_busy_share": float(np.mean([outcome.learner_share(*window) for outcome in outcomes])),
        "groups_per_s": float(np.mean([outcome.groups_per_s(*window) for outcome in outcomes])),
        "capacity_groups_per_s": capacity,
        "age_mean_steps": float(np.mean(ages)),
        "age_p95_steps": float(np.percentile(ages, 95)),
        "age_max_steps": int(np.max(ages)),
        "groups": len(ages),
        "simulation_cpu_s": time.process_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 1, 2, 3, 5, 8])
    parser.add_argument("--num_steps", type=int, default=30)
    args = parser.parse_args()
    rows = [measure(case, args.num_steps) for case in cases(args.engines, args.thresholds)]
    print_table(rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
