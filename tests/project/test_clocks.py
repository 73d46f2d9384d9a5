"""A clock that is set, by a person or by NTP, does nothing to a run."""

import ast
import os
from pathlib import Path

import pytest
from whole_runs import Process, assert_ledger_balances, command, rows

PACKAGE = Path(__file__).parents[2] / "open_instruct"
TELLS_THE_TIME_OF_DAY = {
    "doctor.py",  # looks whether the clock is right
    "data_types.py",
    "parameter_synchronizer.py",
    "batch_producer.py",
    "run_summary.py",
    "step_exports.py",
    "options_file.py",
    "journal.py",
    "rollout_record.py",
    "prompt_traces.py",
    "mlflow_tracker.py",
    "metrics_endpoint.py",  # when the newest row was written
    "states.py",  # whether a run on another machine has written a moment ago
}
"""They write it down for people; nothing is decided by it."""
FOR_ROLLOUTS = {"effects.py", "runner.py"}
"""They refuse a rollout the clock, and give it the time that it asks its context for."""


def test_no_wait_and_no_limit_is_measured_by_a_clock_that_can_be_set() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
                found.setdefault(path.name, []).append(node.lineno)
    assert found.keys() <= TELLS_THE_TIME_OF_DAY | FOR_ROLLOUTS, found


SHIFTED = """
import os, time

_time, _time_ns = time.time, time.time_ns

def _shift():
    try:
        with open(os.environ.get("OPEN_INSTRUCT_TEST_CLOCK", "")) as file:  # a jail has no such variable
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0

time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
"""


@pytest.mark.slow
def test_a_run_under_a_clock_that_jumps_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By seconds and by an hour, both ways, in every Python process of the run."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SHIFTED)
    clock, out = tmp_path / "clock", tmp_path / "out"
    monkeypatch.setenv("OPEN_INSTRUCT_TEST_CLOCK", str(clock))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(PACKAGE.parent)]))
    process = Process(command(out, total_episodes=16 * 40, async_steps=2, vllm_num_engines=2, generation_timeout=30))
    for number, shift in enumerate((-5, 5, 3600, -3600, 0), start=1):
        process.wait_for_rows(out / "metrics.jsonl", 6 * number)
        clock.write_text(str(shift))
    code, output = process.wait(240)
    assert code == 0, output
    assert_ledger_balances(out)
    last = rows(out / "metrics.jsonl")[-1]
    assert (last["training_step"], last["engine_restarts"]) == (40, 0)
    assert not any(row.get("groups_given_up") for row in rows(out / "metrics.jsonl"))
