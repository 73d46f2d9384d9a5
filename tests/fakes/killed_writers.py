# ruff: noqa: E402 - the path comes first
"""Writers of a record that are killed at random moments: `python killed_writers.py DIRECTORY NUMBER SEED`.

Each child writes steps of three groups as fast as it can, resumes where the one before was killed, and is killed by SIGKILL.
After each kill the parent reads the record. It prints how many steps were there at the end.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np
from group_fakes import make_group

from open_instruct.record import writer as writer_module
from open_instruct.record.journal import Journal
from open_instruct.record.places import RECORD
from open_instruct.record.reader import RunRecord
from open_instruct.record.samples import RecordedGroup
from open_instruct.record.writer import RecordWriter

LIFE_S = 0.4
"""Most seconds from the first write to the kill."""


def write_until_killed(output: Path) -> None:
    root = output / RECORD
    journal = Journal(root)
    journal.start()
    done = max(RunRecord(output).steps(), default=0)
    writer_module.LOG_AFTER_S = 0.0
    writer = RecordWriter(root, done)
    for step in range(done + 1, done + 100_000):
        for number in range(3):
            group = make_group([1.0, 0.0], prompt_id=f"train-{3 * step + number}")
            rewards = np.array([1.0, 0.0])
            outcome = "zero_std" if number == 0 else "consumed"
            writer.add(step, RecordedGroup(group, rewards, "line 1", "a.jsonl", "1", outcome, 0, step, time.time()))
        writer.flush(60.0)
        writer.commit(step)
        writer.flush(60.0)
        journal.event("step", step=step)


def check(output: Path) -> int:
    """Read everything. Returns the number of trained steps."""
    record = RunRecord(output)
    steps = record.steps()
    assert steps == list(range(1, len(steps) + 1)), steps
    for step in steps[-3:]:
        rows = record.samples(step).to_pylist()
        expected = [(f"train-{3 * step + number}", sample) for number in range(3) for sample in range(2)]
        assert sorted((row["prompt_id"], row["sample"]) for row in rows) == sorted(expected), step
    open_steps = record.open_steps()
    assert open_steps in ([], [len(steps) + 1]), (steps[-3:], open_steps)
    for step in open_steps:
        assert record.samples(step).num_rows in (0, 2, 4, 6)
    told = [event["step"] for event in record.events()]
    assert told in (steps, steps[:-1]) or set(told) <= set(steps), (told[-3:], steps[-3:])
    assert all(start["end"] is None for start in record.starts())
    return len(steps)


def main(output: Path, number: int, seed: int) -> None:
    moments, num_steps = random.Random(seed), 0
    (output / RECORD).mkdir(parents=True)
    for _ in range(number):
        child = os.fork()
        if child == 0:
            write_until_killed(output)
        deadline = time.monotonic() + 60.0
        while len(RunRecord(output).events()) <= num_steps and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, LIFE_S))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        num_steps = check(output)
    print(num_steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
