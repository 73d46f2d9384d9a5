"""Runs one program and ends it with everything that it has started. A standalone script that needs only the standard library.

    python -I -S program_supervisor.py DESCRIPTOR COMMAND …

The supervisor starts the command in a session of its own. As soon as the command ends, or the other end of the pipe DESCRIPTOR
closes because the engine wants it or has ended, the supervisor kills all its descendants, also those that left the session.
It ends with the command's exit code, or with 128 and the number of the signal that ended the command.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127
KILL_S = 10.0
"""Longest wait for killed processes to end. The kernel may delay the end of a process that waits for a device."""


def main() -> int:
    control, words = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever loses its parent becomes a child of this process
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        _become(libc, supervisor, control, words)
    silent = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the ends of the program's pipes are the program's alone
        os.dup2(silent, number)
    watched = os.pidfd_open(program)
    ending = select.poll()  # `select.select` takes no descriptor from 1024 on; an engine with many programs has some
    for descriptor in (control, watched):
        ending.register(descriptor, select.POLLIN)
    ending.poll()
    return _end(program)


def _become(libc: ctypes.CDLL, supervisor: int, control: int, words: list[str]) -> None:
    try:
        os.setsid()
        os.close(control)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would too
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == supervisor:
            os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _end(program: int) -> int:
    """Kill all remaining processes. Returns the program's exit code."""
    code, deadline = 128 + signal.SIGKILL, time.monotonic() + KILL_S
    pid, status = os.waitpid(program, os.WNOHANG)
    if pid:
        code = _code(status)
    while time.monotonic() < deadline:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.005)
    return code


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _children() -> list[int]:
    """Processes whose parent is this process. If a process is killed, its children become children of this process."""
    pid, pids = str(os.getpid()), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if parent == pid:
                pids.append(int(name))
    return pids


if __name__ == "__main__":
    sys.exit(main())
