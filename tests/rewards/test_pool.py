"""Reward functions in processes of their own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.rewards.functions import Description, RewardCall, RewardFunctionError
from open_instruct.rewards.pool import FunctionResult, RewardFunctions
from open_instruct.system.sandbox import missing

FUNCTIONS = """
import asyncio, os, socket, time
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
