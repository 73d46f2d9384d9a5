"""Reward functions in processes of their own."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.rewards.functions import Description, RewardCall, RewardFunctionError
from open_instruct.rewards.pool import FunctionResult, RewardFunctions, _result
from open_instruct.system.sandbox import missing

FUNCTIONS = """
import asyncio, json, os, socket, subprocess, threading, time
import next_door

def right(completions, answer, **kwargs):
    print("this must not come between the answers")
    return [next_door.one if text == wanted else -2.5 for text, wanted in zip(completions, answer)]

def only_named(completions):
    return range(len(completions))

async def later(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, topic=None, **kwargs):
    await asyncio.sleep(0.05)
    log_metric("at step", trainer_state.global_step)
    log_extra("topics", topic)
    return [None, len(completions[1][0]["content"]) + len(completion_ids[1])]

def raises(completions, **kwargs):
    raise KeyError("boom")

def too_few(completions, **kwargs):
    return [1.0]

def no_number(completions, **kwargs):
    return ["1"] * len(completions)

def not_finite(completions, **kwargs):
    return [float("nan")] * len(completions)

def no_list(completions, **kwargs):
    return 1.0

def hangs(completions, **kwargs):
    time.sleep(60)

def ends(completions, **kwargs):
    os._exit(3)

def reaches_out(completions, **kwargs):
    socket.create_connection(("127.0.0.1", 9))

def environment(completions, **kwargs):
    return [float("A_KEY" in os.environ)] * len(completions)

def leaves_a_child(completions, pids, **kwargs):
    child = os.fork() or time.sleep(60)
    with open(pids[0], "a") as file:
        print(child, file=file)
    os._exit(3)

def dies_later(completions, pids, **kwargs):
    child = subprocess.Popen(["sleep", "60"])
    with open(pids[0], "a") as file:
        print(child.pid, file=file)
    threading.Timer(0.2, os._exit, [3]).start()
    return [0.0] * len(completions)

def writes_among_the_answers(completions, **kwargs):
    for descriptor in range(3, 8):
        try:
            os.write(descriptor, b"x" * 2**21)
        except OSError:
            pass
    return [0.0] * len(completions)

def reads_input(completions, **kwargs):
    return [float(len(subprocess.run(["cat"], capture_output=True).stdout))] * len(completions)

def parses(completions, **kwargs):
    return json.loads("no JSON")

def in_no_order(completions, **kwargs):
    return {1.0, 2.0}

def logs_too_few(completions, log_extra, **kwargs):
    log_extra("shape", ["round"])
    return [1.0] * len(completions)

def logs_too_much(completions, log_extra, **kwargs):
    log_extra("shape", ["x" * 2**26] * len(completions))
    return [1.0] * len(completions)

def changes_what_it_gets(prompts, completions, tests, **kwargs):
    for prompt, completion, of_response in zip(prompts, completions, tests):
        prompt.extend(completion)
        of_response.append("seen")
    return [len(prompt) * 10 + len(of_response) for prompt, of_response in zip(prompts, tests)]

async def gives_up_a_task(completions, topic, **kwargs):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task

a_number = 3

class AClass: ...
"""
CALL = RewardCall("1 + 1 =", ["2", "3"], [[7], [8, 9]], {"answer": "2", "topic": "sums"}, {"global_step": 4})


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "next_door.py").write_text("one = 3.0")
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


@contextmanager
def functions(file: str, *names: str, timeout_s: float = 20.0, is_jailed: bool = False) -> Iterator[RewardFunctions]:
    specs = [RewardFunctionSpec(f"{file}:{name}") for name in names]
    pool = RewardFunctions(specs, timeout_s=timeout_s, num_processes=2, is_jailed=is_jailed)
    try:
        yield pool
    finally:
        pool.close()


def results(pool: RewardFunctions, call: RewardCall = CALL) -> list[FunctionResult]:
    return pool.submit(call).result(timeout=60)


def test_functions_get_what_they_name_and_may_be_async(file: str) -> None:
    with functions(file, "right", "only_named", "later") as pool:
        described = [future.result(timeout=60) for future in pool.describe()]
        assert described[0] == Description(("answer",), is_async=False)
        assert described[2] == Description((), is_async=True)
        conversation = replace(CALL, prompt=[{"role": "user", "content": "?"}])
        right, named = results(pool)[:2]
        assert (right.rewards, named.rewards) == ([3.0, -2.5], [0.0, 1.0])
        later = results(pool, conversation)[2]
        assert later.rewards == [None, 3.0]  # one character and two tokens
        assert later.metrics == {"at_step": 4.0}
        assert later.extra == {"topics": ["sums", "sums"]}
        assert later.seconds >= 0.05


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("raises", "error: raises: KeyError: 'boom' (mine.py line 19, in raises)"),
        (
            "too_few",
            "error: too_few: ValueError: it returned 1 rewards for 2 completions. Return one for each, in order",
        ),
        ("no_number", "error: no_number: ValueError: its reward for completion 0 is '1', which is no finite number."),
        ("not_finite", "error: not_finite: ValueError: its reward for completion 0 is nan, which is no finite number."),
        ("no_list", "error: no_list: ValueError: it returned 1.0, not a list."),
        ("ends", "crash: ends"),
        (
            "parses",
            "error: parses: json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py line",
        ),
        ("in_no_order", "error: in_no_order: ValueError: it returned {1.0, 2.0}, not a list."),
        (
            "logs_too_few",
            "error: logs_too_few: ValueError: log_extra('shape'): 1 values for 2 completions. Give a list",
        ),
        ("logs_too_much", "error: logs_too_much: it logged more than 64 MiB for one prompt"),
        ("gives_up_a_task", "error: gives_up_a_task: asyncio.exceptions.CancelledError"),
    ],
)
def test_a_function_that_fails_is_named_and_the_others_score(name: str, failure: str, file: str) -> None:
    with functions(file, name, "only_named") as pool:
        for _ in range(2):  # a process that has ended is replaced
            broken, whole = results(pool)
            assert broken.failure.startswith(failure)
            assert (broken.rewards, whole.rewards) == ([None, None], [0.0, 1.0])


def test_a_function_that_takes_too_long_is_ended_and_named(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with functions(file, "hangs", timeout_s=0.3) as pool, caplog.at_level(logging.WARNING):
        (late,) = results(pool)
    assert late == FunctionResult([None, None], "timeout: hangs")
    assert "the reward function hangs is slow: it was ended for the 2 responses to one prompt" in caplog.text


@pytest.mark.parametrize(("name", "failure"), [("leaves_a_child", "crash: leaves_a_child"), ("dies_later", "")])
def test_what_a_function_has_started_ends_with_it(name: str, failure: str, file: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with functions(file, name, timeout_s=30.0) as pool:
        began = time.monotonic()
        (ended,) = results(pool, replace(CALL, columns={"pids": str(pids)}))
        assert ended.failure == failure
        assert time.monotonic() - began < 20.0  # the child holds no pipe that would be waited for
        child = Path(f"/proc/{int(pids.read_text())}/stat")
        until = time.monotonic() + 5.0
        while child.exists() and ") Z " not in child.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        assert not child.exists() or ") Z " in child.read_text()


def test_killed_processes_leave_no_open_file(file: str) -> None:
    with functions(file, "ends", "writes_among_the_answers", timeout_s=5.0) as pool:
        results(pool)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            results(pool)
        until = time.monotonic() + 5.0
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
            time.sleep(0.02)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_function_has_no_input_and_its_own_copies(file: str) -> None:
    conversation = replace(CALL, prompt=[{"role": "user", "content": "?"}], columns={"tests": ["1"]})
    with functions(file, "reads_input", "changes_what_it_gets") as pool:
        nothing, changed = results(pool, conversation)
    assert nothing.rewards == [0.0, 0.0]
    assert changed.rewards == [22.0, 22.0]  # two messages, two tests


def test_without_a_response_no_function_is_called(file: str) -> None:
    with functions(file, "raises") as pool:
        assert results(pool, replace(CALL, texts=[], completion_ids=[])) == [FunctionResult([])]


@pytest.mark.parametrize(
    "answer",
    [
        {"rewards": [10**400], "metrics": {}, "extra": {}},
        {"rewards": [1.0], "metrics": {"m": 10**400}, "extra": {}},
        {"rewards": [1.0], "metrics": {}, "extra": {"column": 3}},
        {"rewards": [1.0], "metrics": {}, "extra": {}, "seconds": []},
    ],
)
def test_an_answer_that_no_process_of_ours_would_give_costs_its_group_alone(answer: dict[str, Any]) -> None:
    assert _result(answer, "f", 1) == FunctionResult([None], "crash: f: its process gave no rewards")


def test_a_slow_import_is_no_slow_function(
    file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(file).write_text("import time; time.sleep(0.6)\ndef quick(completions): return [1.0] * len(completions)")
    monkeypatch.setattr("open_instruct.rewards.pool.SLOW_S", 0.5)
    with functions(file, "quick") as pool, caplog.at_level(logging.WARNING):
        for future in [pool.submit(CALL) for _ in range(2)]:  # the second call starts a process
            assert future.result(timeout=60)[0].rewards == [1.0, 1.0]
    assert "is slow" not in caplog.text


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{file}:nope", "there is no nope in {file}. Its functions are: right, only_named, later"),
        ("{file}:a_number", "{file}:a_number: is no function"),
        ("{file}:AClass", "it is a class"),
        ("{file}", "name a file and a function in it"),
        ("{folder}/gone.py:f", "there is no file"),
        ("no_such_package.rewards:f", "cannot be imported: ModuleNotFoundError"),
        ("{folder}/broken.py:f", "cannot be imported: ZeroDivisionError"),
        ("{folder}/ends.py:f", "its process ended while it was imported"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(target: str, words: str, file: str) -> None:
    folder = Path(file).parent
    (folder / "broken.py").write_text("1 / 0")
    (folder / "ends.py").write_text("import os; os._exit(1)")
    pool = RewardFunctions(
        [RewardFunctionSpec(target.format(file=file, folder=folder))], timeout_s=5.0, num_processes=1
    )
    try:
        with pytest.raises(RewardFunctionError) as raised:
            pool.describe()[0].result(timeout=60)
    finally:
        pool.close()
    assert words.format(file=file) in str(raised.value)


@pytest.mark.skipif(bool(missing()), reason="this kernel has no jail")
def test_in_the_jail_a_function_computes_and_reaches_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    with functions(file, "right", "reaches_out", "environment", is_jailed=True) as pool:
        right, outside, keys = results(pool)
    assert right.rewards == [3.0, -2.5]
    assert outside.failure.startswith("error: reaches_out: PermissionError")
    assert keys.rewards == [0.0, 0.0]
    with functions(file, "environment") as pool:
        assert results(pool)[0].rewards == [1.0, 1.0]
