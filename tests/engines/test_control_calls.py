"""Calls that the engine thread runs for others; the test plays the engine thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from open_instruct.engines.control_calls import ControlCalls
from open_instruct.engines.vllm_engine import EngineCoreLost


def served_calls(timeout_s: float = 30.0) -> ControlCalls:
    calls = ControlCalls(3, threading.Condition(), timeout_s=timeout_s)
    calls.is_served = True
    return calls


def serve_while(calls: ControlCalls, command: Callable[[], Any]) -> Any:
    """What `run` of `command` gives a caller, while this thread serves."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(calls.run, command)
        while not answer.done():
            calls.serve()
        return answer.result()


def test_command_runs_in_the_serving_thread() -> None:
    assert serve_while(served_calls(), threading.get_ident) == threading.get_ident()


def test_command_has_a_thread_of_its_own_while_nobody_serves() -> None:
    thread = ControlCalls(3, threading.Condition(), timeout_s=0.0).run(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_error_of_a_command_is_its_callers_even_if_it_is_a_timeout() -> None:
    def fail() -> None:
        raise TimeoutError("the workers did not answer")

    with pytest.raises(TimeoutError, match=r"^the workers did not answer$"):
        serve_while(served_calls(), fail)


def test_command_whose_caller_gave_up_never_runs() -> None:
    calls, ran = served_calls(timeout_s=0.01), []
    with pytest.raises(TimeoutError, match=r"^engine 3: the engine thread did not take up a control call for 0\.01 s$"):
        calls.run(lambda: ran.append(1))
    calls.serve()
    assert not ran


def test_command_that_is_under_way_is_said_to_be_unfinished() -> None:
    calls, may_end = served_calls(timeout_s=0.3), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(calls.run, lambda: may_end.wait(30))
        answer.add_done_callback(lambda _: may_end.set())
        while not answer.done():
            calls.serve()
        with pytest.raises(TimeoutError, match="did not finish a control call"):
            answer.result()


def test_callers_that_wait_when_the_engine_thread_ends_are_told_at_once() -> None:
    calls = served_calls()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(calls.run, lambda: None)
        while not calls:
            pass
        calls.close()
        with pytest.raises(EngineCoreLost, match=r"^engine 3 has stopped$"):
            answer.result(timeout=10)
    assert calls.run(lambda: 7) == 7
