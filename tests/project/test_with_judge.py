"""`scripts/with_judge.py`: a command beside a judge's server, which ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import TINY_MODEL

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from with_judge import run  # noqa: E402

SCRIPT = SCRIPTS / "with_judge.py"
ASKS = """
import json, os, urllib.request
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=key)
print("served:", json.load(urllib.request.urlopen(request))["data"][0]["id"])
raise SystemExit(3)
"""


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)])
def test_the_exit_code_is_the_command_s(code: str, expected: int) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert run([sys.executable, "-c", code], dict(os.environ)) == expected
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_no_command_is_a_mistake() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", TINY_MODEL, "--"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no command stands behind --" in done.stderr


@pytest.mark.extended
def test_the_command_can_ask_the_judge_and_nothing_is_left(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--model", str(TINY_MODEL), "--log", str(tmp_path / "judge.log"), "--"]
    done = subprocess.run(
        [*words, sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 3, done.stderr + (tmp_path / "judge.log").read_text()[-2000:]
    assert f"served: {TINY_MODEL}" in done.stdout
    assert not servers()


@pytest.mark.extended
@pytest.mark.alone
def test_sigterm_reaches_the_command_and_then_the_judge_ends(tmp_path: Path) -> None:
    waits = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    begun = tmp_path / "begun"
    words = [sys.executable, str(SCRIPT), "--model", str(TINY_MODEL), "--log", str(tmp_path / "judge.log"), "--"]
    process = subprocess.Popen([*words, sys.executable, "-c", waits, str(begun)])
    deadline = time.monotonic() + 300
    while not begun.exists():
        assert process.poll() is None, (tmp_path / "judge.log").read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not servers()


def servers() -> list[int]:
    """Processes of judges that still run."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if {"vllm.entrypoints.openai.api_server", str(TINY_MODEL)} <= set(one.info["cmdline"] or ())
    ]
