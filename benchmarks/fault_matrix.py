"""Kills and stops every process of real runs and measures what comes of it.

    python benchmarks/fault_matrix.py                      every fault once, a table in Markdown
    python benchmarks/fault_matrix.py --only learner       those whose name begins so
    python benchmarks/fault_matrix.py --rounds 3 --json figures.json

Each run is the main program with the tiny model on this machine: two engines, one learner, a checkpoint every second step. Once
it has trained a few steps one process is killed (SIGKILL) or stopped (SIGSTOP), its disk filled, or its clock set. Measured are
the seconds until the log names it, and until the run trains again, or has ended with nothing left of it. A run that has ended is
started again by the same command: it has to go on from its checkpoint, no prompt may be used twice, and then it has the next
fault.

The output directory is a disk of its own, a file that is mounted: that needs root, and without it no disk is filled.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).parents[1]
MARK = "OPEN_INSTRUCT_FAULT_MATRIX"
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
STEPS_BEFORE = 4
STEPS_AFTER = 3
"""That a run which goes on has to train after the fault."""
START_S = 240.0
CLOCK = f"{MARK}_CLOCK"
CLOCK_THAT_IS_SET = f"""
import os, time

_time, _time_ns = time.time, time.time_ns

def _shift():
    try:
        with open(os.environ["{CLOCK}"]) as file:
            return float(file.read() or 0)
    except (KeyError, OSError, ValueError):  # a jail has no such variable
        return 0.0

time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
"""
GOING_ON = "going on from"
DISK_BYTES = 1 << 29
LIMIT_S = 150.0
"""For noticing and for ending or going on, each."""


@dataclass(frozen=True)
class Fault:
    """One process, what is done to it, and what has to come of it."""

    name: str
    role: str
    """How the command line of the process begins, or what stands in it; `#2` is the second of several."""
    signal: "signal.Signals | Callable[[Run], None]"
    """Or something else that is done to the run."""
    outcome: Literal["goes on", "ends"]
    told: str
    """Stands in the log, or on the terminal, once the fault is noticed."""
    lasts_s: float | None = None
    """The process is stopped for so long, then goes on; None: for ever."""
    exit_code: int = 1
    """Of a run that ends."""
    amid: str = ""
    """The fault that comes just before, and is noticed already."""


def fill_the_disk(run: "Run") -> None:
    """Nothing can be written any more. `empty_the_disk` makes room before the next start."""
    with suppress(OSError), open(run.filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def empty_the_disk(run: "Run") -> None:
    run.filler.unlink(missing_ok=True)


def set_the_clock(run: "Run") -> None:
    """By five seconds and by an hour, both ways, in every Python process of the run."""
    for shift in (-5, 5, 3600, -3600, 0):
        run.clock.write_text(str(shift))
        time.sleep(3.0)


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LAST = "-1"
ENGINE, LEARNER, CONTROLLER = "ray::LLMRayActor", "ray::PolicyTrainerRayProcess", "ray::RolloutController"
QUEUE = "ray::_QueueActor"
"""Of prompts, of results and of training data: all three have this title."""
FAULTS = [
    Fault("engine killed", ENGINE, KILL, "goes on", "starting it again"),
    Fault("engine stopped", ENGINE, STOP, "goes on", "has been stopped for"),
    Fault("learner killed", LEARNER, KILL, "ends", "learner 0 died"),
    Fault("engine killed as it starts", f"{ENGINE}#{LAST}", KILL, "goes on", "starting it again", amid="engine killed"),
    Fault("learner stopped", LEARNER, STOP, "ends", "learner 0 (process"),
    Fault("controller killed", CONTROLLER, KILL, "ends", "the controller failed"),
    Fault("controller stopped", CONTROLLER, STOP, "ends", "the controller (process"),
    *(Fault(f"queue {number} of 3 killed", f"{QUEUE}#{number}", KILL, "ends", "queue failed") for number in (1, 2, 3)),
    *(
        Fault(f"queue {number} of 3 stopped", f"{QUEUE}#{number}", STOP, "ends", "queue (process")
        for number in (1, 2, 3)
    ),
    Fault("verifiers killed", "verifiers.scorers", KILL, "goes on", "the verifiers' process is started again"),
    Fault("Ray's GCS killed", "gcs_server", KILL, "ends", "Ray's GCS (process"),
    Fault("Ray's GCS stopped", "gcs_server", STOP, "ends", "Ray's GCS (process"),
    Fault("raylet killed", "raylet", KILL, "ends", "aylet"),
    Fault("raylet stopped", "raylet", STOP, "ends", "Ray's raylet (process"),
    Fault("disk full", "", fill_the_disk, "ends", "No space left"),
    Fault("clock set by 5 s and 1 h", "", set_the_clock, "goes on", ""),
    Fault("wandb stopped", "wandb-core", STOP, "goes on", "", lasts_s=20.0),
    Fault("wandb killed", "wandb-core", KILL, "goes on", "wandb failed"),
    Fault("terminal closed (SIGHUP)", "driver", signal.SIGHUP, "goes on", "the terminal is gone"),
    Fault("driver killed", "driver", KILL, "ends", "", exit_code=-KILL),
    Fault("driver stopped", "driver", STOP, "goes on", "", lasts_s=60.0),
    Fault("SIGTERM", "driver", signal.SIGTERM, "ends", "SIGTERM", exit_code=85),
    Fault(
        "SIGTERM amid a replacement", "driver", signal.SIGTERM, "ends", "SIGTERM", exit_code=85, amid="engine killed"
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What one run showed."""

    fault: str
    noticed_s: float | None
    over_s: float
    """Until it trained `STEPS_AFTER` steps more, or nothing was left of it."""
    exit_code: int | None
    """None: it went on."""
    steps_lost: int
    """Trained before the fault and again after the restart."""
    problem: str = ""


class Run:
    """One start of the main program, whose processes are found by a mark in their environment."""

    def __init__(self, output_dir: Path, mark: str, further: Sequence[str] = ()) -> None:
        self.output_dir = output_dir
        self.mark = mark
        self._started: set[psutil.Process] = set()
        directory = output_dir.parent.parent
        self.terminal = directory / f"{output_dir.name}-{mark[:8]}.log"
        self.filler = output_dir.with_name("filler")
        self.clock = directory / "clock"
        self.clock.write_text("0")
        (directory / "sitecustomize.py").write_text(CLOCK_THAT_IS_SET)
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        env |= {MARK: mark, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, CLOCK: str(self.clock)}
        with open(self.terminal, "wb") as file:
            self.process = subprocess.Popen(
                [*command(output_dir), *further], env=env, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        with suppress(FileNotFoundError):
            return self.terminal.read_text(errors="replace")
        return ""

    def steps(self) -> list[int]:
        """Training steps that are written down, in order."""
        with suppress(FileNotFoundError):
            lines = (self.output_dir / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line)["training_step"] for line in lines]
        return []

    def pids(self) -> list[tuple[int, str]]:
        """Everything that the run has started and that is still there."""
        words = f"{MARK}={self.mark}".encode()
        processes = list(psutil.process_iter())
        self._started |= {one for one in processes if words in _content(one.pid, "environ").split(b"\0")}
        for one in processes:  # verifiers do not inherit the environment
            with suppress(psutil.Error):
                if any(parent in self._started for parent in one.parents()):
                    self._started.add(one)
        self._started &= set(processes)  # by number and start time
        titles = {
            one.pid: _content(one.pid, "cmdline").replace(b"\0", b" ").decode(errors="replace") for one in self._started
        }
        return [(pid, title) for pid, title in titles.items() if title]  # one that has ended has none

    def pid_of(self, role: str) -> int:
        if role == "driver":
            return self.process.pid
        if role in ("raylet", "gcs_server"):
            return next(pid for pid, title in self.pids() if title.partition(" ")[0].endswith(role))
        title_of, _, number = role.partition("#")
        found = [
            pid
            for pid, title in sorted(self.pids())
            if title.startswith(title_of) or (":" not in role and role in title)
        ]
        return found[int(number) if number == LAST else int(number or 1) - 1]

    def kill(self) -> None:
        for pid, _ in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def _content(pid: int, name: str) -> bytes:
    """A file of /proc; empty where the process has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def command(output_dir: Path) -> list[str]:
    """More steps than any measurement waits for."""
    return [
        *(sys.executable, str(ROOT / "open_instruct" / "grpo_fast.py")),
        *("--model_name_or_path", str(ROOT / "assets" / "tiny_model")),
        *("--dataset_mixer_list", f"{SUMS}&size=8000&seed=7", "1.0"),
        *(
            "--num_unique_prompts_rollout",
            "8",
            "--num_samples_per_prompt_rollout",
            "4",
            "--total_episodes",
            str(32 * 5000),
        ),
        *("--max_prompt_token_length", "64", "--response_length", "32", "--pack_length", "512"),
        *("--beta", "0.0", "--load_ref_policy", "False", "--vllm_enforce_eager", "--vllm_num_engines", "2"),
        *("--filter_zero_std_samples", "False", "--verification_reward", "1.0", "--async_steps", "2"),
        *("--checkpoint_state_freq", "2", "--seed", "3", "--with_tracking", "--output_dir", str(output_dir)),
    ]


def wait_for(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until it holds; None if it did not."""
    started = time.monotonic()
    while time.monotonic() - started < limit_s:
        if condition():
            return time.monotonic() - started
        time.sleep(0.1)
    return None


def measure_all(faults: Sequence[Fault], directory: Path) -> Iterator[Outcome]:
    """One fault after the other. What one ends is started again by the same command, and has the next one."""
    run = Run(directory / "disk" / "out", uuid.uuid4().hex)
    try:
        for fault in faults:
            if not _trains(run):
                yield Outcome(fault.name, None, 0.0, None, 0, "no run to try it on")
                run.kill()
                run = Run(directory / "disk" / f"out-{fault.name.replace(' ', '-')}", uuid.uuid4().hex)
                continue
            outcome, run = measure(fault, run)
            yield outcome
    finally:
        run.kill()


def _trains(run: Run) -> bool:
    wanted = len(run.steps()) + STEPS_BEFORE
    return (
        wait_for(lambda: len(run.steps()) >= wanted or run.process.poll() is not None, START_S) is not None
        and run.lives
    )


def measure(fault: Fault, run: Run) -> tuple[Outcome, Run]:
    """What comes of one fault, and the run that there is after it."""
    if fault.amid:
        inflict(next(one for one in FAULTS if one.name == fault.amid), run)
        if fault.role != "driver":  # what takes the place of the one before
            before = run.pid_of(fault.role)
            wait_for(lambda: run.pid_of(fault.role) > before, LIMIT_S)
    trained = run.steps()[-1]
    started, noticed = inflict(fault, run)
    unnoticed = f"{fault.told!r} was never said" if fault.told and noticed is None else ""
    if fault.outcome == "goes on":
        return Outcome(fault.name, noticed, *_went_on(run, started), unnoticed), run
    if wait_for(lambda: not run.lives and not run.pids(), LIMIT_S) is None:
        left = ", ".join(title[:40] for _, title in run.pids())
        unnoticed = f"still there: {left}"
        run.kill()
    over = time.monotonic() - started
    trained = max([trained, *run.steps()])
    empty_the_disk(run)
    again = Run(run.output_dir, uuid.uuid4().hex)
    begins = wait_for(lambda: GOING_ON in again.text() or not again.lives, START_S)
    code = run.process.returncode
    problem = unnoticed or ("" if code == fault.exit_code else f"exit code {code} instead of {fault.exit_code}")
    problem = problem or ("" if begins is not None and again.lives else "it did not go on after")
    words = again.text().rpartition(GOING_ON)[2].partition("after step ")[2].split()
    first_again = int(words[0]) + 1 if words else 1
    problem = problem or _used_twice(run.output_dir)
    return Outcome(fault.name, noticed, over, run.process.returncode, max(trained + 1 - first_again, 0), problem), again


def inflict(fault: Fault, run: Run) -> tuple[float, float | None]:
    """When it was done, and the seconds until it was noticed."""
    told_before = run.text().count(fault.told) if fault.told else 0
    if callable(fault.signal):
        victim, started = 0, time.monotonic()
        fault.signal(run)
    else:
        victim = run.pid_of(fault.role)
        os.kill(victim, fault.signal)
        started = time.monotonic()
    if fault.lasts_s is not None:
        time.sleep(fault.lasts_s)
        os.kill(victim, signal.SIGCONT)
    if not fault.told:
        return started, None
    return started, wait_for(lambda: run.text().count(fault.told) > told_before, LIMIT_S)


def _went_on(run: Run, started: float) -> tuple[float, int | None, int]:
    """Seconds until it had trained further, the exit code if it had not, and no step that was lost."""
    before = run.steps()[-1]
    wait_for(lambda: run.steps()[-1] >= before + STEPS_AFTER or not run.lives, LIMIT_S)
    return time.monotonic() - started, run.process.poll(), 0


def _used_twice(output_dir: Path) -> str:
    lines = (output_dir / "prompts.jsonl").read_text().splitlines()
    ids = [prompt["prompt_id"] for line in lines for prompt in json.loads(line)["prompts"]]
    return "" if len(ids) == len(set(ids)) else f"{len(ids) - len(set(ids))} prompts were used twice"


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault: medians and ranges over its runs."""
    lines = [
        "| fault | named after (s) | over after (s) | exit code | steps lost | runs |",
        "|---|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(one.fault for one in outcomes):
        runs = [one for one in outcomes if one.fault == fault]
        codes = ", ".join(sorted({"goes on" if one.exit_code is None else str(one.exit_code) for one in runs}))
        lost = _range([one.steps_lost for one in runs])
        noticed, over = _range([one.noticed_s for one in runs]), _range([one.over_s for one in runs])
        problems = "; ".join(sorted({one.problem for one in runs if one.problem}))
        lines.append(
            f"| {fault} | {noticed} | {over} | {codes} | {lost} | {len(runs)}{f': {problems}' if problems else ''} |"
        )
    return "\n".join(lines)


def _range(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    show = (lambda value: f"{value:d}") if isinstance(known[0], int) else (lambda value: f"{value:.1f}")
    middle = statistics.median(known)
    whole = f"{show(type(known[0])(middle))}"
    return whole if min(known) == max(known) else f"{whole} ({show(min(known))}-{show(max(known))})"


@contextmanager
def a_disk(directory: Path) -> Iterator[bool]:
    """Mounted at `disk` in there, where that is allowed; else a plain directory, and False."""
    image, disk = directory / "image", directory / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    mounted = False
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True, capture_output=True)
        mounted = True
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each fault")
    parser.add_argument("--only", default="", help="faults whose name begins so")
    parser.add_argument("--asleep_s", type=float, help="how long the driver is stopped, instead of a minute")
    parser.add_argument("--json", type=Path, help="every figure, for later")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.name.startswith(options.only)]
    if options.asleep_s is not None:
        faults = [fault if fault.lasts_s is None else replace(fault, lasts_s=options.asleep_s) for fault in faults]
    outcomes = []
    for number in range(options.rounds):
        directory = Path(tempfile.mkdtemp(prefix="fault_matrix_"))
        with a_disk(directory) as mounted:
            possible = [fault for fault in faults if mounted or fault.signal is not fill_the_disk]
            for outcome in measure_all(possible, directory):
                outcomes.append(outcome)
                print(f"round {number + 1}: {outcome}", file=sys.stderr, flush=True)
        if not any(one.problem for one in outcomes):
            shutil.rmtree(directory)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    print(table(outcomes))
    return int(any(one.problem for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
