"""Trains under random kills and stops of random processes, and checks what is written down in the end.

    python benchmarks/soak.py                       an hour
    python benchmarks/soak.py --minutes 10 --seed 2

The run is that of `fault_matrix.py`: two engines, one learner, the tiny model, a checkpoint every second step. Every now and then
any one of its processes, Ray's and the driver among them, is killed, or stopped for a while. Whenever the run ends it is started
again by the same command. In the end it gets SIGTERM, and then every training step stands in `metrics.jsonl` once, in order, no
prompt was used twice, and of the prompts that were issued each one was used or dropped, with the reason.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script
from benchmarks.fault_matrix import Run, wait_for

QUIET_S = (2.0, 40.0)
"""Between two faults, once the run trains again."""
STOPPED_S = (0.5, 40.0)
TRAINS_AGAIN_S = 240.0
"""After a fault, and after a start: until the next step is trained, or the run has ended."""
LEFT_S = 20.0
"""For whatever a run has started to be gone after its end."""
END_S = 120.0


@dataclass
class Soak:
    """What happened so far."""

    directory: Path
    random: random.Random
    runs: list[Run] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def start(self) -> None:
        self.runs.append(Run(self.directory / "disk" / "out", uuid.uuid4().hex))

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} step {(self.run.steps() or [0])[-1]}: {text}", file=sys.stderr, flush=True)

    def go_on(self, minutes: float) -> None:
        """Until the time is up."""
        deadline = time.monotonic() + 60 * minutes
        self.start()
        while time.monotonic() < deadline:
            self.see_it_train()
            if time.monotonic() < deadline and not self.problems:
                time.sleep(self.random.uniform(*QUIET_S))
                self.hurt()
            if self.problems:
                return

    def see_it_train(self) -> None:
        """Wait for the next step; start the run again where it has ended."""
        before = len(self.run.steps())
        wait_for(lambda: len(self.run.steps()) > before or not self.run.lives, TRAINS_AGAIN_S)
        if not self.run.lives:
            self.end_of_run()
            self.start()
        elif len(self.run.steps()) <= before:
            self.problems.append(f"neither a step nor an end within {TRAINS_AGAIN_S:g} s")

    def end_of_run(self) -> None:
        code = self.run.process.returncode
        self.exit_codes[code] += 1
        if wait_for(lambda: not self.run.pids(), LEFT_S) is None:
            self.problems.append(f"left behind: {', '.join(title[:60] for _, title in self.run.pids())}")
            self.run.kill()
        self.say(f"ended with {code}: {_last_line(self.run.text())}")

    def hurt(self) -> None:
        """One process, chosen at random."""
        processes = self.run.pids()
        if not processes:
            return
        pid, title = self.random.choice(processes)
        lasts_s = self.random.choice([None, self.random.uniform(*STOPPED_S)])
        what = f"{_name(title)} {'killed' if lasts_s is None else 'stopped'}"
        self.faults[what] += 1
        self.say(f"{what}, process {pid}" + ("" if lasts_s is None else f", for {lasts_s:.0f} s"))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if lasts_s is None else signal.SIGSTOP)
        if lasts_s is not None:
            time.sleep(lasts_s)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """By SIGTERM, with a checkpoint; one that ends just then is started again."""
        while not self.problems:
            wait_for(lambda: "step" in self.run.text() or not self.run.lives, TRAINS_AGAIN_S)
            self.see_it_train()
            if self.run.lives:
                self.run.process.send_signal(signal.SIGTERM)
                if wait_for(lambda: not self.run.lives, END_S) is None:
                    self.problems.append(f"SIGTERM, and no end within {END_S:g} s")
                elif self.run.process.returncode == 85:
                    self.end_of_run()
                    return
                else:
                    self.problems.append(f"SIGTERM, and exit code {self.run.process.returncode}")


def _name(title: str) -> str:
    words = title.split()
    if not words:
        return "(no title)"
    if "grpo_fast.py" in title:
        return "driver"
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    for known in (
        "verifiers.scorers",
        "OPEN_INSTRUCT_STARTED_BY",
        "OPEN_INSTRUCT_RUN",
        "resource_tracker",
        "log_monitor",
        "runtime_env",
        "agent",
        "wandb",
    ):
        if known in title:
            return known
    return Path(words[0]).name


def _last_line(text: str) -> str:
    return next((line[:160] for line in reversed(text.splitlines()) if line.strip()), "")


def check(output_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Figures of what is written down, and what is wrong with it."""
    problems = []
    steps = [json.loads(line)["training_step"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    if steps != list(range(1, len(steps) + 1)):
        problems.append("the steps in metrics.jsonl are not 1, 2, 3, …")
    lines = (output_dir / "prompts.jsonl").read_text().splitlines()
    ids = [prompt["prompt_id"] for line in lines for prompt in json.loads(line)["prompts"]]
    if len(ids) != len(set(ids)):
        problems.append(f"{len(ids) - len(set(ids))} prompts were used twice")
    summary = json.loads((output_dir / "summary.json").read_text())["prompts"]
    used, dropped = summary["consumed"], sum(summary["dropped"].values())
    if summary["issued"] != used + dropped or used != len(ids):
        problems.append(f"the ledger does not add up: {summary}, {len(ids)} prompts in prompts.jsonl")
    return {"steps": len(steps), **summary}, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    soak = Soak(Path(tempfile.mkdtemp(prefix="soak_")), random.Random(options.seed))
    started = time.monotonic()
    try:
        soak.go_on(options.minutes)
        soak.end()
    finally:
        soak.run.kill()
    figures, wrong = check(soak.directory / "disk" / "out") if not soak.problems else ({}, [])
    print(
        f"{(time.monotonic() - started) / 60:.0f} minutes, {len(soak.runs)} starts, exit codes {dict(soak.exit_codes)}"
    )
    for what, count in sorted(soak.faults.items()):
        print(f"  {count:3d}  {what}")
    print(f"  {figures}")
    for problem in [*soak.problems, *wrong]:
        print(f"PROBLEM: {problem}")
    if not soak.problems and not wrong:
        shutil.rmtree(soak.directory)
    else:
        print(f"see {soak.directory}")
    return int(bool(soak.problems or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
