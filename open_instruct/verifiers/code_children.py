"""The jailed processes of the code verifiers. Each runs either a program of the model or the tests of a row, never both.

    controller ──► program's process: runs the program, answers calls (`code_programs.py`)        knows no test
        └────────► test's process: runs one test after another, asks for calls (`code_tests.py`)

A test's calls are sent to the controller, which passes them on to the program's process and sends the answers back. Arguments and
results are sent as plain data (`code_wire.py`). So the only way for a program to pass a test is to return the right value.
"""

import fcntl
import importlib
import os
import resource
import socket
import sys

from open_instruct.system.cells.reaper import die_with_parent
from open_instruct.system.sandbox import Jail, limit_to_computing, restrict_calls
from open_instruct.verifiers.code_names import OFTEN_IMPORTED
from open_instruct.verifiers.code_programs import ProgramProcess, usual_names
from open_instruct.verifiers.code_tests import TestProcess
from open_instruct.verifiers.code_wire import Channel

GRACE_S = 1.0
"""Seconds in addition to the limit of a test, because a busy machine takes a while to start a process."""
CHANNEL = 3
"""File descriptor of a child's channel to the controller."""


def serve(fork_server: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Run as a child of the code verifiers: enter the jail, and serve the controller's requests until it closes the channel."""
    try:
        die_with_parent(fork_server)
        _arrange_descriptors(descriptor, silent)
        limit_to_computing(jail)
        restrict_calls(jail)
        sys.set_int_max_str_digits(0)  # the time limit bounds what long numbers cost
        _do_what_is_asked(Channel(CHANNEL))
    finally:
        os._exit(0)


def _arrange_descriptors(descriptor: int, silent: int) -> None:
    """Use the two descriptors that the controller sends first as standard input and output. The controller makes them, because no
    file can grow in the jail, and reads the output meanwhile, because a pipe may hold only 4 KiB. If the controller sends none,
    the input is empty and the output is discarded."""
    with socket.socket(fileno=os.dup(descriptor)) as channel:
        _, streams, *_ = socket.recv_fds(channel, 1, 2)
    stdin, stdout = streams or (os.open(os.devnull, os.O_RDONLY), silent)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (stdin, stdout, silent, descriptor)]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(CHANNEL + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _do_what_is_asked(channel: Channel) -> None:
    program, test = ProgramProcess(channel), TestProcess(channel)
    actions = {
        "program": program.program,
        "call": program.call,
        "method": program.method,
        "take": program.take,
        "stdio": program.stdio,
        "test": test.test,
    }
    while True:
        message = channel.receive()
        channel.send(actions[message["do"]](message))


def prepare() -> None:
    """Import what programs often need. Called in the process from which children are forked, before it enters a jail."""
    for name in OFTEN_IMPORTED.split():
        importlib.import_module(name)
    usual_names()
