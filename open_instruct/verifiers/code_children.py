"""What runs in the jailed processes of the code verifiers: a program of the model, or the tests of a row. Never both in one.

    controller ──► program's process: runs the program, answers calls (`code_programs.py`)        knows no test
        └────────► test's process: runs one test after another, asks for calls (`code_tests.py`)

A test's calls go to the controller, which passes them on to the program's process, and its answers back. Arguments and results
travel as plain data (`code_wire.py`). So a program can make a test pass by returning the right value and in no other way.
"""

import fcntl
import importlib
import os
import resource
import socket

from open_instruct.system.sandbox import Jail, die_with_parent, limit_to_computing, restrict_calls
from open_instruct.verifiers.code_names import OFTEN_IMPORTED
from open_instruct.verifiers.code_programs import ProgramProcess, usual_names
from open_instruct.verifiers.code_tests import TestProcess
from open_instruct.verifiers.code_wire import Channel

GRACE_S = 1.0
"""Beside the limit of a test: a busy machine takes a while to start a process."""
CHANNEL = 3
"""File descriptor of a child to the controller."""


def serve(fork_server: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Become a child of the code verifiers: shut in, with a channel to the controller, and do what it says until it closes."""
    try:
        die_with_parent(fork_server)
        _arrange_descriptors(descriptor, silent)
        limit_to_computing(jail)
        restrict_calls(jail)
        _do_what_is_asked(Channel(CHANNEL))
    finally:
        os._exit(0)


def _arrange_descriptors(descriptor: int, silent: int) -> None:
    """Standard input and output are what the controller sends first. It makes them, because in the jail no file can grow, and
    reads the output, because a pipe may hold as little as 4 KiB. Without any the input is empty, and the output goes nowhere."""
    with socket.socket(fileno=os.dup(descriptor)) as channel:
        _, given, *_ = socket.recv_fds(channel, 1, 2)
    stdin, stdout = given or (os.open(os.devnull, os.O_RDONLY), silent)
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (stdin, stdout, silent, descriptor)]
    for target, one in enumerate(moved):
        os.dup2(one, target)
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
    """In the process from which children are forked: import what programs often need, before there is a jail around it."""
    for name in OFTEN_IMPORTED.split():
        importlib.import_module(name)
    usual_names()
