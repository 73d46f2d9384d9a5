"""Cells that do what they are told, for test_cells.py. Light to import: the fork server does it."""

import os
import pickle
import time
from typing import Any

from open_instruct.system.cells.fork_server import CHANNEL, CellKind
from open_instruct.system.cells.framing import HEAD, packed, receive, send, unpacked
from open_instruct.system.sandbox import Jail


class Doing(CellKind):
    name = "doers"

    def __init__(self, problem: str = "", *, is_jailed: bool = False) -> None:
        self.problem = problem
        self.jail = Jail() if is_jailed else None
        self.num_prepared = 0

    def load(self) -> dict[str, Any]:
        if self.problem == "hangs":
            time.sleep(600)
        if self.problem == "ends":
            os._exit(3)
        if self.problem:
            raise ValueError(self.problem)
        return {"pid": os.getpid()}

    def prepare(self, order: object) -> bool:
        self.order = order
        if order == "end the fork server":
            os._exit(3)
        self.num_prepared += 1
        return self.num_prepared == 1

    def serve(self) -> None:
        while True:
            message = unpacked(receive(CHANNEL))
            match message["do"]:
                case "echo":
                    send(CHANNEL, packed(message))
                case "hang":
                    time.sleep(600)
                case "late":
                    time.sleep(message["seconds"])
                    send(CHANNEL, packed(message))
                case "half":
                    os.write(CHANNEL, HEAD.pack(100) + b"{")
                    os._exit(3)
                case "no JSON":
                    send(CHANNEL, HEAD.pack(5) + b"nope!")
                case "pickle":
                    content = pickle.dumps({"do": "echo"})
                    send(CHANNEL, HEAD.pack(len(content)) + content)
                case "long":
                    send(CHANNEL, packed({"text": "x" * 2000}))
                case "describe":
                    held = sorted(map(int, os.listdir("/proc/self/fd"))) if self.jail is None else []
                    facts = {"pid": os.getpid(), "order": self.order, "num_prepared": self.num_prepared, "held": held}
                    send(CHANNEL, packed(facts))
