"""Calls in threads that end with them."""

import threading

import pytest

from open_instruct.system.short_lived_thread import run_in_short_lived_thread


def test_a_call_runs_in_another_thread_which_is_gone_afterwards() -> None:
    thread = run_in_short_lived_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("late"), KeyboardInterrupt()])
def test_what_a_call_raises_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_in_short_lived_thread(fail)
    assert raised.value is error
