"""Exit codes after a signal, the same for every program."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from open_instruct import rc_actor
from open_instruct.system.interruption import Interrupted
from open_instruct.system.signals import Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_exit_codes(number: int, code: int) -> None:
    assert Interrupted(number).exit_code == code
    assert str(Interrupted(number)) == signal.Signals(number).name


def test_both_ways_to_take_a_signal_end_in_the_same_exception() -> None:
    signals = Signals()
    signals.install()
    signal.raise_signal(signal.SIGTERM)
    signals.remove()
    with pytest.raises(Interrupted, match="SIGTERM"):
        signals.raise_if_received()
    with pytest.raises(Interrupted, match="SIGINT"), rc_actor.signals_as_exceptions():
        signal.raise_signal(signal.SIGINT)


SLOW_START = """
import os, signal, sys, time
from open_instruct import grpo_fast
from open_instruct.system import secret_masking
def read(argv):
    print("reading", flush=True)
    time.sleep(60)
grpo_fast.read_options_and_data = read
grpo_fast.main([])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_a_signal_while_options_and_data_are_read(number: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in error


TELLS = """
import logging, os, signal, sys, time
from open_instruct.system.interruption import ends_by_signals, tell
logging.basicConfig(filename=sys.argv[1])
with ends_by_signals():
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1] + "-nobody-listens"):
        time.sleep(0.05)
    for number in range(3):
        tell(f"line {number} " + "x" * 100_000)
        time.sleep(0.1)
"""


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", TELLS, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    (tmp_path / "log-nobody-listens").touch()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "log").read_text().count("stdout is closed") == 1


def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the session of a terminal whose other end is closed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", TELLS, str(tmp_path / "log")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    deadline = time.monotonic() + 30
    while "SIGHUP" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (tmp_path / "log-nobody-listens").touch()
    process.wait(timeout=30)
    assert (tmp_path / "log").read_text().count("the terminal is closed") == 1


def test_what_a_process_ends_with_is_masked() -> None:
    program = (
        "from open_instruct.system.secret_masking import mask_tracebacks; mask_tracebacks(); "
        "raise ValueError('http://host/v1?apiKey=s3cr3ts3cr3t&X-Amz-Signature=f00f00f00&n=1')"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "ValueError: http://host/v1?***&***&n=1" in process.stderr
    assert "s3cr3t" not in process.stderr
