"""A small process that runs one program, and ends it with everything that it has started.

    words_of(supervise) DESCRIPTOR COMMAND …

The supervisor starts the command in a session of its own. As soon as the command ends, or the other end of the pipe DESCRIPTOR
closes because the owner wants it or has ended, the supervisor kills all its descendants, also those that left the session. It
ends with the command's exit code, or with 128 and the number of the signal that ended the command. Whatever a program writes to
its standard streams is the program's alone.
"""

import os
import select
import signal
import sys

from open_instruct.system.cells.reaper import become_subreaper, die_with_parent, end_children

NOT_STARTED = 127
KILL_S = 10.0
"""As `reaper.KILL_S`."""


def supervise() -> int:
    """Run as a supervisor."""
    control, words = int(sys.argv[1]), sys.argv[2:]
    become_subreaper()  # whatever loses its parent becomes a child of this process
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        _become(supervisor, control, words)
    silent = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the ends of the program's pipes are the program's alone
        os.dup2(silent, number)
    ending = select.poll()  # `select.select` takes no descriptor from 1024 on; an engine with many programs has some
    for descriptor in (control, os.pidfd_open(program)):
        ending.register(descriptor, select.POLLIN)
    ending.poll()
    pid, status = os.waitpid(program, os.WNOHANG)
    end_children(KILL_S)
    code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _become(supervisor: int, control: int, words: list[str]) -> None:
    try:
        os.setsid()
        os.close(control)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would too
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(supervisor)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)
