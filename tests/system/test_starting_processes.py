"""A process that is about to run a program is told from one that has none, and is not left behind."""

import os
import subprocess
from pathlib import Path

from open_instruct.system.cleanup_process import CleanupProcess
from open_instruct.system.processes import is_in_exec

MARK = "OPEN_INSTRUCT_TEST_MARK"


def start_marked(value: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env={MARK: value})


def test_a_process_in_exec_is_known_until_its_environment_is_there() -> None:
    for _ in range(200):
        with start_marked("here") as process:
            directory = Path(f"/proc/{process.pid}")
            command = (directory / "cmdline").read_bytes()
            is_known = (
                (directory / "environ").read_bytes() == f"{MARK}=here\0".encode() if command else is_in_exec(directory)
            )
            process.kill()
        assert is_known


def test_a_zombie_is_not_in_exec() -> None:
    process = start_marked("dead")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_in_exec(Path(f"/proc/{process.pid}"))
    process.wait()
    assert not is_in_exec(Path(f"/proc/{process.pid}"))


def test_processes_that_have_just_been_started_do_not_outlive_their_starter() -> None:
    for _ in range(10):
        cleanup = CleanupProcess(f"{MARK}=late")
        cleanup.tell([])
        processes = [start_marked("late") for _ in range(3)]
        assert cleanup._started.stdin is not None
        cleanup._started.stdin.close()  # as the kernel does when the starter ends
        for process in processes:
            assert process.wait(timeout=10) < 0
