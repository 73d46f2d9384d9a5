"""Calls in threads that end with them."""

import threading

import pytest

from open_instruct.system.passing_threads import in_passing_thread


def test_a_call_runs_in_another_thread_which_is_gone_afterwards() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("late"), KeyboardInterrupt()])
def test_what_a_call_raises_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        in_passing_thread(fail)
    assert raised.value is error
