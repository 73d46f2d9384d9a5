# ruff: noqa: F811 - `stage` is a fixture
"""Agent programs that hang, die, leave something behind or say nothing useful."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from played_agents import (  # noqa: F401 - `stage` is a fixture
    BRANCHES,
    TWO_REQUESTS,
    GatheringPolicy,
    MakeStage,
    assert_samples_are_what_the_engine_said,
    notes,
    program_in_documents,
    stage,
    text_of,
)

from open_instruct.system.cells.supervisor import supervise
from open_instruct.system.processes import words_of
from open_instruct.workflows.agents.options import AgentOptions
from open_instruct.workflows.agents.rollout import verdict_of
from open_instruct.workflows.agents.workflow import AgentPrograms
from open_instruct.workflows.base import metrics_of_results

FORKS = """
import signal
for number in range(3):
    if os.fork() == 0:
        os.setsid()                 # leaves the session of the program
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            pass                    # loses its parent
        time.sleep(1000)
said(generate(ROW["prompt_token_ids"], max_tokens=20))
note(pid=os.getpid())
time.sleep(1000)
"""


def children_since(before: set[int]) -> list[psutil.Process]:
    alive = psutil.Process().children(recursive=True)
    return [child for child in alive if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE]


def processes_with(text: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and text in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_that_hangs_is_killed_with_all_that_it_has_started(stage: MakeStage) -> None:
    one = stage(FORKS, timeout_s=3.0)
    result = one.roll_out()
    assert result.samples == []
    assert "it ran longer than 3 s (--agent_timeout_s)" in result.error
    wait_until(lambda: not processes_with(str(one.path)))


def test_nothing_is_left_when_the_engine_ends(stage: MakeStage, tmp_path: Path) -> None:
    one = stage(FORKS)
    one.runner.start(one.request(n=2))
    wait_until(lambda: len(notes(tmp_path)) == 2)
    assert len(processes_with(str(one.path))) >= 14  # of each: supervisor, program, three children, three of theirs
    one.close()
    wait_until(lambda: not processes_with(str(one.path)))


def test_nothing_is_left_when_the_engine_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "agent_alone.py"
    program.write_text(
        "import os, pathlib, time\n"
        + FORKS.replace('said(generate(ROW["prompt_token_ids"], max_tokens=20))\nnote(pid=os.getpid())', "{}").format(
            f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()"
        )
    )
    words = [sys.executable, "-S", str(program)]
    engine = f"""
import asyncio, os
from open_instruct.workflows.agents.programs import Program

async def main():
    program = await Program.start({words!r}, variables=os.environ, directory="", text="", timeout_s=1000.0)
    await program.wait()

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", engine], cwd=Path(__file__).parents[2])
    try:
        wait_until(lambda: (tmp_path / "begun").exists(), 120.0)
        wait_until(lambda: len(processes_with(str(program))) >= 7)
    finally:
        process.kill()
        process.wait(20)
    wait_until(lambda: not processes_with(str(program)))


def test_what_a_program_leaves_behind_ends_with_it(stage: MakeStage) -> None:
    one = stage(FORKS.rpartition("time.sleep")[0] + "os._exit(0)")
    result = one.roll_out()
    assert not result.error
    wait_until(lambda: not processes_with(str(one.path)))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("said(generate(ROW['prompt_token_ids']))\nsys.exit(3)", "it ended with code 3"),
        ("said(generate(ROW['prompt_token_ids']))\nos.kill(os.getpid(), 11)", "it ended with code 139"),
        ("said(generate(ROW['prompt_token_ids']))\nraise KeyError('oh')", "KeyError: 'oh'"),
        ("pass", "it ended without a completion"),
    ],
)
def test_a_dying_program_is_begun_again_and_then_given_up_by_name(
    stage: MakeStage, tmp_path: Path, program: str, why: str
) -> None:
    one = stage("note(attempt=1)\n" + program, attempts=3)
    result = one.roll_out()
    assert result.samples == []
    assert why in result.error
    assert str(one.path) in result.error
    assert len(notes(tmp_path)) == 3
    assert not one.errors


def test_an_announced_reward_must_be_there(stage: MakeStage) -> None:
    silent = "said(generate(ROW['prompt_token_ids']))\nprint('fine')"
    assert "--agent_prints_reward" in stage(silent, prints_reward=True).roll_out().error
    [sample] = stage(silent).roll_out().samples
    assert sample.environment_reward is None  # not known, which is not 0
    for line in ('{"reward": "1"}', '{"reward": NaN}', "[1]", '{"score": 1}'):
        assert "--agent_prints_reward" in stage(f"{silent}\nprint({line!r})", prints_reward=True).roll_out().error


def test_after_a_failure_a_rollout_says_the_same(stage: MakeStage, tmp_path: Path) -> None:
    program = TWO_REQUESTS + "if sum(1 for _ in open(os.environ['NOTES'])) == 1: os._exit(1)\n"
    one = stage(program, attempts=2)
    result = one.roll_out()
    assert not result.error
    assert result.notes[0]["num_restarts"] == 1
    seeds = [sampling.seed for sampling in one.policy.samplings]
    assert seeds[:2] == seeds[2:]
    assert len(result.samples) == 1
    first, again = notes(tmp_path)
    assert first["replies"] == again["replies"]


def test_what_a_program_does_not_wait_for_is_not_trained_on(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    import http.client, urllib.parse
    url = urllib.parse.urlsplit(os.environ["OPEN_INSTRUCT_GENERATE_URL"])
    hasty = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"token_ids": ROW["prompt_token_ids"], "sampling_params": {"max_tokens": 20}})
    hasty.request("POST", url.path, body, {"Content-Type": "application/json"})
    while not os.path.exists(os.environ["NOTES"]):
        time.sleep(0.01)
    hasty.close()
    said(generate(ROW["prompt_token_ids"] + [9], max_tokens=20))
    """

    def say(*_: Any) -> str:
        (tmp_path / "notes").touch()
        return "hello there<end>"

    result = stage(program, say, policy=GatheringPolicy).roll_out()
    assert not result.error
    [sample] = result.samples
    assert sample.prompt_ids[-1] == 9
    assert result.notes[0]["num_lost"] == 1


def test_only_so_many_programs_run_at_once(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    note(at=time.monotonic(), change=1)
    said(generate(ROW['prompt_token_ids'], max_tokens=20))
    time.sleep(0.2)
    note(at=time.monotonic(), change=-1)
    """
    one = stage(program, max_concurrent=2)
    result = one.roll_out(n=5)
    assert not result.error
    running = np.cumsum([note["change"] for note in sorted(notes(tmp_path), key=lambda note: note["at"])])
    assert running.max() == 2
    assert max(account["wait_s"] for account in result.notes) > 0.2


def test_output_of_a_program_is_read_to_its_end(stage: MakeStage) -> None:
    program = """
    said(generate(ROW['prompt_token_ids'], max_tokens=20))
    sys.stdout.write("word " * 1000000)
    sys.stderr.write("error " * 100000)
    print()
    print(json.dumps({"reward": 2}))
    """
    [sample] = stage(program).roll_out().samples
    assert sample.environment_reward == 2.0


def kept(words: list[str], *, descriptor: int | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a command under a supervisor whose pipe has this number."""
    theirs, ours = os.pipe()
    try:
        if descriptor is not None:
            os.dup2(theirs, descriptor)
        number = theirs if descriptor is None else descriptor
        command = [*words_of(supervise), str(number), *words]
        return subprocess.run(command, pass_fds=[number], capture_output=True, timeout=20.0)
    finally:
        for number in {theirs, ours, theirs if descriptor is None else descriptor}:
            os.close(number)


def test_a_program_ends_as_it_should_where_the_engine_has_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    try:
        assert kept(["true"], descriptor=1500).returncode == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_has_the_signals_that_a_shell_gives_it() -> None:
    """With SIGPIPE ignored, `yes | head -1` complains of a broken pipe, and a loop in place of `yes` never ends."""
    ended = kept(["bash", "-c", "yes | head -1 > /dev/null; exit ${PIPESTATUS[0]}"])
    assert ended.returncode == 128 + signal.SIGPIPE


def test_a_last_line_is_read_only_as_an_object_with_a_reward() -> None:
    assert verdict_of("3") is None
    assert verdict_of('{"score": 3}') is None
    verdict = verdict_of('{"reward": null, "metrics": {"a": 1, "b": true}}')
    assert verdict is not None
    assert (verdict.reward, verdict.metrics) == (None, {"a": 1.0})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "there is no program to start"),
        ({"agent_command": "no_such_program x"}, "there is no program no_such_program. Give one that can be run here"),
        ({"agent_command": "python 'x"}, "it is no command line"),
        ({"agent_command": "python x", "agent_tool_parser_type": "hermes"}, "it must be legacy, dr_tulu or vllm_"),
        ({"agent_command": "python x", "agent_max_samples": 0}, "out of range"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], told: str) -> None:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.option_limits import numbers_are_within_limits

    args = GRPOConfig(model_name_or_path="m", rollout_workflow="agent_program", **options)
    [mistake] = [*AgentPrograms.mistakes(args), *numbers_are_within_limits(args)]
    assert told in mistake
    assert "--agent_" in mistake


def test_lengths_hold_whatever_a_program_asks() -> None:
    from open_instruct.config.grpo_config import GRPOConfig

    args = GRPOConfig(
        model_name_or_path="m",
        rollout_workflow="agent_program",
        agent_command="python x",
        max_prompt_token_length=50,
        response_length=100,
        eval_response_length=300,
        num_samples_per_prompt_rollout=4,
        agent_max_samples=3,
    )
    lengths = args.lengths
    assert (lengths.sequence, lengths.trained, lengths.response, lengths.samples) == (350, 350, 100, 12)


def test_rows_tell_programs_what_they_say() -> None:
    workflow = AgentPrograms(AgentOptions(agent_command="python x"))
    assert workflow.row_facts({"env_config": {"a": [1]}, "tools": [], "environment": None}) == {
        "env_config": {"a": [1]}
    }
    with pytest.raises(ValueError, match="must be JSON"):
        workflow.row_facts({"env_config": {"a": float("nan")}})


def test_metrics_are_listed(stage: MakeStage) -> None:
    from open_instruct.report.metric_names import find

    one = stage(BRANCHES)
    result = one.roll_out(n=2)
    metrics = metrics_of_results(one.workflow, [result])
    assert (metrics["agents/requests"], metrics["agents/samples"], metrics["env/agent/turns"]) == (4.0, 3.0, 4.0)
    assert all(find(name) is not None for name in metrics)


def test_the_program_of_the_documents_runs(stage: MakeStage) -> None:
    """With the `openai` package, as a user has it."""

    def say(text: str, _: int) -> str:
        return "<answer>46</answer><end>" if "<output>" in text else "<calculator>12 + 34</calculator>"

    one = stage("", say, timeout_s=120.0, prints_reward=True)
    one.path.write_text(program_in_documents("my_agent.py"))
    one.workflow.options.agent_command = f"python {one.path}"
    result = one.roll_out(limit_s=120.0)
    assert not result.error
    [sample] = result.samples
    assert text_of(sample) == ("<calculator>12 + 34</calculator><output>\n46\n</output>\n<answer>46</answer><|end|>")
    assert sample.environment_reward == 0.5
    assert result.notes[0]["metrics"] == {"calls": 1.0}
    assert_samples_are_what_the_engine_said(result, one)
