"""The checks for a machine with a GPU: what passed and what did not is told, nothing is left running, and they run on CPU."""

import itertools
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
from gpu_check_steps import STEPS, TINY_MODEL, Outcome, Step, Surroundings, engine_processes, trained  # noqa: E402

pytestmark = pytest.mark.extended

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); time.sleep(99)"


def step(name: str, code: str, limit_s: int = 60, **options: object) -> Step:
    judge = options.pop("judge", lambda here: Outcome(True, "1.5 s a step"))
    return Step(name, "a test", limit_s, lambda here: [sys.executable, "-c", code], judge, **options)  # type: ignore[arg-type]


def surroundings(directory: Path) -> Surroundings:
    directory.mkdir(exist_ok=True)
    environment = {**os.environ, "OPEN_INSTRUCT_GPU_CHECK": str(directory)}
    return Surroundings(directory, "cuda", "a pretended GPU", environment)


def test_a_step_that_fails_stops_no_other_and_the_table_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = surroundings(tmp_path / "out")
    steps = [
        step("broken", "raise SystemExit(3)"),
        step("hanging", SLEEPER, limit_s=2),
        step("unreadable", "", judge=lambda here: 1 / 0),
        step("elsewhere", "", left_out=lambda here: "needs two GPUs"),
        step("fine", "print('seen')"),
    ]
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    monkeypatch.setattr(Surroundings, "find", lambda *_: here)
    assert gpu_check.main(["--output_dir", str(here.output_dir)]) == 1
    lines = (here.output_dir / "table.txt").read_text().splitlines()
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert told["broken"].startswith("FAILED")
    assert told["broken"].endswith("exit code 3; see broken.log")
    assert told["hanging"].endswith("not done within its limit; see hanging.log")
    assert "ZeroDivisionError" in told["unreadable"]
    assert told["elsewhere"] == "left out 0.0 needs two GPUs"
    assert told["fine"].startswith("passed")
    assert told["fine"].endswith("1.5 s a step")
    assert "On a pretended GPU:" in capsys.readouterr().out
    assert not here.processes()
    with tarfile.open(here.output_dir / "gpu_check.tar.gz") as archive:
        assert {"gpu_check/fine.log", "gpu_check/table.txt"} <= set(archive.getnames())


def test_all_passed_is_exit_code_0_and_what_has_no_time_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = surroundings(tmp_path / "out")
    monkeypatch.setattr(gpu_check, "STEPS", [step("fine", ""), step("late", "")])
    monkeypatch.setattr(Surroundings, "find", lambda *_: here)
    assert gpu_check.main(["--output_dir", str(here.output_dir), "--only", "fine"]) == 0
    assert "late" not in (here.output_dir / "table.txt").read_text()
    assert gpu_check.main(["--output_dir", str(here.output_dir), "--limit_min", "0.1"]) == 0
    assert "no time left; --limit_min gives more" in (here.output_dir / "table.txt").read_text()


def test_results_of_an_earlier_call_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = surroundings(tmp_path / "out")
    of_earlier_call = here.output_dir / "fine" / "metrics.jsonl"
    of_earlier_call.parent.mkdir()
    of_earlier_call.touch()
    monkeypatch.setattr(gpu_check, "STEPS", [step("fine", "")])
    monkeypatch.setattr(Surroundings, "find", lambda *_: here)
    assert gpu_check.main(["--output_dir", str(here.output_dir)]) == 0
    assert not of_earlier_call.exists()


def test_a_run_passes_if_it_made_its_steps_and_the_log_probs_agree(tmp_path: Path) -> None:
    here = surroundings(tmp_path)
    (tmp_path / "run").mkdir()
    row = (
        '{"training_step": 1, "debug/vllm_vs_local_logprob_diff_mean": %s, "time/total": 2.0, '
        '"memory/learners_offloaded_bytes": 3145728}\n'
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(row % "0.01" * 2)
    outcome = trained("run", 2)(here)
    assert outcome == Outcome(True, "2 steps, log-prob difference 1.0e-02, 2.0 s a step, learners gave back 3 MiB")
    assert trained("run", 3)(here) == Outcome(False, "2 steps instead of 3")
    for wrong in ("0.2", "NaN", "null"):
        (tmp_path / "run" / "metrics.jsonl").write_text(row % "0.01" * (wrong != "null") + row % wrong)
        assert not trained("run", 1)(here).passed


def test_the_engine_to_kill_is_found_among_the_processes_of_this_run_alone(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', 'Engine' + 'Core'])"
    marks = [str(tmp_path / "mine"), str(tmp_path / "other")]
    runs = [
        psutil.Popen([sys.executable, "-c", code], env={**os.environ, "OPEN_INSTRUCT_GPU_CHECK": mark})
        for mark in marks
    ]
    try:
        deadline = time.monotonic() + 30
        while not all(run.children() for run in runs) and time.monotonic() < deadline:
            time.sleep(0.05)
        core = runs[0].children()[0]
        found: list[int] = []
        while len(found) < 2 and time.monotonic() < deadline:
            found = [process.pid for process in engine_processes(Surroundings(tmp_path / "mine", "cpu", "", {}))]
        assert found == [runs[0].pid, core.pid]
    finally:
        for run in runs:
            for process in [*run.children(), run]:
                process.kill()
            run.wait(10)


def test_steps_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [step.name for step in STEPS]


RUNS = [step for step in STEPS if "single_gpu.sh" in " ".join(step.command(Surroundings(Path("/o"), "cuda", "", {})))]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_options_of_every_run_are_accepted(run: Step, kind: str, tmp_path: Path) -> None:
    from open_instruct.config.checks import collect_mistakes
    from open_instruct.config.cli import UsageError, parse_args
    from open_instruct.config.grpo_config import GRPOConfig

    # What single_gpu.sh is told, with an interpreter that prints what it is given.
    printer = tmp_path / "python"
    printer.write_text('#!/bin/sh\nshift\nprintf "%s\\n" "$@"\n')
    printer.chmod(0o755)
    here = Surroundings(tmp_path / "out", kind, "", {**os.environ, "PYTHON": str(printer)})
    told = subprocess.run(run.command(here), env=here.environment, capture_output=True, text=True, check=True).stdout
    # A step that first builds a model may say something before.
    words = itertools.dropwhile(lambda word: not word.startswith("--"), told.splitlines())
    argv = [str(TINY_MODEL) if word.startswith("Qwen/") else word for word in words]
    mistakes: list[str] = []
    try:
        parse_args([*argv, "--device_type", kind], GRPOConfig, validators=[collect_mistakes])
    except UsageError as error:  # for want of a GPU, and of the large model
        mistakes = [told for told in error.mistakes if "room for 0" not in told and "reads 1024 tokens" not in told]
    assert mistakes == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_list_runs_on_cpu_in_the_layout_of_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    words = ["bash", ROOT / "scripts" / "gpu_check.sh", "--output_dir", tmp_path, "--limit_min", "50"]
    done = subprocess.run(
        list(map(str, words)), env=environment, capture_output=True, text=True, timeout=3300, check=False
    )
    table = (tmp_path / "table.txt").read_text()
    assert done.returncode == 0, table
    statuses = {line.split()[0]: line.split()[1] for line in table.splitlines()[1:]}
    assert statuses == {
        step.name: "left" if step.name in ("small_model", "large_model") else "passed" for step in STEPS
    }
    assert table.count("log-prob difference") == 7
    assert not surroundings(tmp_path).processes()
