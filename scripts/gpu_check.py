"""Run a list of checks, each with a limit, and say what passed. Started by `scripts/gpu_check.sh`.

The order is that of what is learned per minute: the whole path with a tiny model comes before a real one. A step that fails
stops no other. On a machine without a GPU the runs take the GPU's layout: an engine core of its own, weights over `shm`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_check_steps import STEPS, Outcome, Step, Surroundings

ROOT = Path(__file__).parents[1]
LEAST_S = 20
"""A step is not begun with less than this left."""


@dataclass(frozen=True)
class Result:
    name: str
    status: str
    seconds: float
    figures: str


def stop(process: "subprocess.Popen[bytes]", here: Surroundings) -> None:
    """End a step and everything that it started, also what has lost its parent since."""
    process.send_signal(signal.SIGTERM)  # a run writes a checkpoint and takes its Ray down
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait(30)
    for left in here.processes():
        left.kill()


def run_step(step: Step, here: Surroundings, limit_s: float) -> Result:
    start = time.monotonic()
    # A run that is there would be told to be complete, and its rows judged in place of this one's.
    shutil.rmtree(here.output_dir / step.name, ignore_errors=True)
    log = here.output_dir / f"{step.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command(here), stdout=output, stderr=subprocess.STDOUT, env=here.environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            outcome = follow(step, here, process, start + limit_s)
        finally:
            if process.poll() is None:
                stop(process, here)
    return Result(step.name, "passed" if outcome.passed else "FAILED", time.monotonic() - start, outcome.figures)


def follow(step: Step, here: Surroundings, process: "subprocess.Popen[bytes]", deadline: float) -> Outcome:
    """Wait for the end of a step and judge it; a step may act on its run meanwhile."""
    try:
        notes = step.meanwhile(here, process, deadline) if step.meanwhile else ""
        code = process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return Outcome(False, f"not done within its limit; see {step.name}.log")
    except Exception as error:  # what one step runs into is no reason to leave out the others
        return Outcome(False, f"{type(error).__name__}: {error}")
    if code not in step.exit_codes:
        return Outcome(False, f"exit code {code}; see {step.name}.log")
    try:
        outcome = step.judge(here)
    except Exception as error:
        return Outcome(False, f"{type(error).__name__}: {error}")
    return Outcome(outcome.passed, ", ".join(filter(None, [outcome.figures, notes])))


def run_all(steps: list[Step], here: Surroundings, limit_s: float) -> list[Result]:
    deadline = time.monotonic() + limit_s
    results = []
    for step in steps:
        left = deadline - time.monotonic()
        if reason := step.left_out(here):
            results.append(Result(step.name, "left out", 0.0, reason))
        elif left < LEAST_S:
            results.append(Result(step.name, "left out", 0.0, "no time left; --limit_min gives more"))
        else:
            limit = min(step.limit_s * here.patience, left)
            print(f"{step.name}: {step.what} (at most {limit:.0f} s)", flush=True)
            results.append(run_step(step, here, limit))
            print(f"  {results[-1].status}: {results[-1].figures}", flush=True)
    return results


def table(results: list[Result]) -> str:
    width = max(len(result.name) for result in results)
    lines = [f"{'step':{width}}  result    seconds  figures"]
    for result in results:
        lines.append(f"{result.name:{width}}  {result.status:8}  {result.seconds:7.1f}  {result.figures}")
    return "\n".join(lines)


def is_evidence(path: Path) -> bool:
    """Logs, metrics and the table, but neither models nor checkpoints."""
    return (
        path.is_file()
        and path.suffix in {".log", ".txt", ".jsonl", ".json", ".out", ".err"}
        and path.stat().st_size < 2**26
    )


def pack(here: Surroundings) -> Path:
    target = here.output_dir / "gpu_check.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(here.output_dir.rglob("*")):
            if is_evidence(path):
                archive.add(path, Path("gpu_check") / path.relative_to(here.output_dir))
        for path in sorted(here.ray_logs().glob("*")) if here.ray_logs().is_dir() else []:
            if is_evidence(path):
                archive.add(path, Path("gpu_check") / "ray" / path.name)
    return target


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check.sh", description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "out" / "gpu_check")
    parser.add_argument("--limit_min", type=float, default=30.0, help="for everything together")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    parser.add_argument(
        "--random_models", action="store_true", help="random weights for models of the hub, which is not in reach"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    steps = [step for step in STEPS if not args.only or step.name in args.only]
    if args.list:
        print("\n".join(f"{step.name:14} {step.limit_s:4} s  {step.what}" for step in steps))
        return 0
    here = Surroundings.find(args.output_dir.resolve(), args.random_models)
    results = run_all(steps, here, args.limit_min * 60)
    text = table(results)
    (here.output_dir / "table.txt").write_text(text + "\n")
    print(f"\nOn {here.device}:\n{text}\n\nEvidence: {pack(here)}")
    return int(any(result.status == "FAILED" for result in results))


if __name__ == "__main__":
    os.chdir(ROOT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the step under way is ended too
    sys.exit(main(sys.argv[1:]))
