"""Exit codes after a signal, the same for every door."""

import signal

import pytest

from open_instruct import coordinator, rc_actor
from open_instruct.interruption import Interrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_exit_codes(number: int, code: int) -> None:
    assert Interrupted(number).exit_code == code
    assert str(Interrupted(number)) == signal.Signals(number).name


def test_both_ways_to_take_a_signal_end_in_the_same_exception() -> None:
    signals = coordinator.Signals()
    signals.install()
    signal.raise_signal(signal.SIGTERM)
    signals.remove()
    with pytest.raises(Interrupted, match="SIGTERM"):
        signals.raise_if_received()
    with pytest.raises(Interrupted, match="SIGINT"), rc_actor.signals_as_exceptions():
        signal.raise_signal(signal.SIGINT)
