"""The page beside a run: it is there with `--watch`, and gone with the run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_args

from open_instruct.record.journal import Journal
from open_instruct.record.places import RECORD
from open_instruct.run.page_beside import page_beside

STARTS_S = 60.0
DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from conftest import make_args
from open_instruct.run.page_beside import page_beside
with page_beside(make_args(output_dir=sys.argv[1], record=True, watch=True)):
    time.sleep(120)
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out" / RECORD).mkdir(parents=True)
    Journal(tmp_path / "out" / RECORD).start()
    return tmp_path / "out"


def pages_of(directory: Path) -> list[int]:
    """Processes that serve the page of this directory."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "prctl" in " ".join(words) and str(directory) in words:
            pids.append(int(path.name))
    return pids


def test_without_watch_the_run_says_how_to_look_at_it(output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with page_beside(make_args(output_dir=str(output), record=True)):
        assert pages_of(output) == []
    text = "".join(capfd.readouterr())
    assert f"look at it: python -m open_instruct.watch {output}" in text
    with page_beside(make_args(output_dir=str(output), record=False)):
        pass
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("ending", ["end of the block", "death of the driver"])
def test_the_page_is_there_and_ends_with_the_run(output: Path, ending: str) -> None:
    words = [sys.executable, "-c", DRIVER, str(output), str(Path(__file__).parents[1])]
    driver = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stdout is not None
    try:
        lines = iter(driver.stdout.readline, "")
        url = next(match[0] for line in lines if (match := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)))
        assert "token=" in url
        assert len(pages_of(output)) == 1
        driver.send_signal(signal.SIGKILL if ending == "death of the driver" else signal.SIGINT)
        driver.wait(30)
        deadline = time.monotonic() + STARTS_S
        while pages_of(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pages_of(output) == []
    finally:
        driver.kill()
        for pid in pages_of(output):
            os.kill(pid, signal.SIGKILL)
