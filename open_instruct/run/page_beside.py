"""The page of a run (`open_instruct.watch`) beside the run: how to start it, and `--watch`, which starts it."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.system.interruption import tell

ENDS_S = 5.0
"""How long the page may take to end, before it is killed."""
OF_A_DEAD_DRIVER = """
import ctypes, os, runpy, signal, sys
driver = int(sys.argv.pop(1))
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == driver:
    runpy.run_module("open_instruct.watch", run_name="__main__", alter_sys=True)
"""
"""Runs the page and ends it (PR_SET_PDEATHSIG) when its driver is killed."""


@contextlib.contextmanager
def page_beside(args: GRPOConfig) -> Iterator[None]:
    """Say how to look at the run. With `--watch` serve its page while the block runs, in a process that cannot disturb it."""
    if not args.record:
        yield
        return
    directory = args.output_dir
    if not args.watch:
        tell(f"look at it: python -m open_instruct.watch {shlex.quote(directory)}")
        yield
        return
    tell("the page of this run:")
    try:
        page = _start(directory)
    except OSError as error:
        tell(f"it cannot be started: {error}")
        yield
        return
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()


def _start(directory: str) -> subprocess.Popen[bytes]:
    """The page in a session of its own, which Ctrl-C does not reach, and at the lowest priority."""
    words = [sys.executable, "-c", OF_A_DEAD_DRIVER, str(os.getpid()), directory]
    return subprocess.Popen(["nice", "-n", "19", *words], stdin=subprocess.DEVNULL, start_new_session=True)
