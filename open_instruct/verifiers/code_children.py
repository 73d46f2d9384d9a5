"""The jailed processes of the code verifiers. Each runs either a program of the model or the tests of a row, never both.

    controller ──► program's process: runs the program, answers calls (`code_programs.py`)        knows no test
        └────────► test's process: runs one test after another, asks for calls (`code_tests.py`)

A test's calls are sent to the controller, which passes them on to the program's process and sends the answers back. Arguments and
results are sent as plain data (`code_wire.py`). So the only way for a program to pass a test is to return the right value.
"""

import importlib
import os
import socket
import sys

from open_instruct.system.cells.fork_server import CHANNEL, CellKind, hold_only
from open_instruct.system.sandbox import Jail
from open_instruct.verifiers.code_names import OFTEN_IMPORTED
from open_instruct.verifiers.code_programs import ProgramProcess, usual_names
from open_instruct.verifiers.code_tests import TestProcess
from open_instruct.verifiers.code_wire import Channel

GRACE_S = 1.0
"""Seconds in addition to the limit of a test, because a busy machine takes a while to start a process."""


class Programs(CellKind):
    """Processes that run programs and tests."""

    name = "programs"
    jail = Jail(cpu_s=600)

    def load(self) -> dict[str, str]:
        """Import what programs often need."""
        for name in OFTEN_IMPORTED.split():
            importlib.import_module(name)
        usual_names()
        return {}

    def settle(self) -> None:
        """Use the two descriptors that the controller sends first as standard input and output. The controller makes them,
        because no file can grow in the jail, and reads the output meanwhile, because a pipe may hold only 4 KiB. If the
        controller sends none, the input is empty and the output is discarded."""
        with socket.socket(fileno=os.dup(CHANNEL)) as channel:
            _, streams, *_ = socket.recv_fds(channel, 1, 2)
        if streams:
            hold_only([*streams, 2, CHANNEL])

    def serve(self) -> None:
        sys.set_int_max_str_digits(0)  # the time limit bounds what long numbers cost
        channel = Channel(CHANNEL)
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
