"""Every part of the program that has work done by processes of its own, behind one interface, for tests of what holds for all.

Run as a script, it is a program that has such work done until it is killed:

    python cell_users.py NAME FOLDER
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
from verifier_fakes import score_by_text

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.environments.base import EnvironmentSpec, ToolCall, Turn
from open_instruct.environments.processes import EnvironmentPool
from open_instruct.rewards.functions import RewardCall
from open_instruct.rewards.pool import RewardFunctions
from open_instruct.system.event_loop_thread import EventLoopThread
from open_instruct.verifiers.code_runs import CodeRuns
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.workflows.agents.programs import Program

RIGHT, HANG, DIE, FLOOD = "right", "hang", "die", "flood"
LIMIT_S = 4.0
"""Seconds that a piece of work may take."""
WHOLE_S = 120.0
KEY = "OPEN_INSTRUCT_TEST_KEY"
_ENVIRONMENT = """
import os, subprocess, time
from open_instruct.environments.base import Environment, Observation, Opening, user_message

class Does(Environment):
    takes_text = True

    async def reset(self, task, seed):
        return Opening([user_message("Go.")])

    async def step(self, turn):
        word = turn.text.partition(" ")[0]
        if word == "hang":
            subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
            time.sleep(600)
        if word == "die":
            os._exit(3)
        return Observation([user_message("x" * (2**23 if word == "flood" else 1))] * (64 if word == "flood" else 1))
"""
_FUNCTION = """
import os, time

def does(completions, **kwargs):
    word = completions[0].partition(" ")[0]
    if word == "hang":
        os.fork()
        time.sleep(600)
    if word == "die":
        os._exit(3)
    return [1.0] if word == "right" else ["x" * 2**20] * 80
"""
_PROGRAMS = {
    RIGHT: "def f(n): return 2 * n",
    HANG: "def f(n):\n    while True: pass",
    DIE: "import os\ndef f(n): os._exit(3)",
    FLOOD: "def f(n): return 'x' * 2**22",
}
_TOOL = {
    RIGHT: "print(46)",
    HANG: "import time\ntime.sleep(600)",
    DIE: "import os\nos.kill(os.getpid(), 11)",
    FLOOD: "print('x' * 2**22)",
}
_AGENTS = {
    RIGHT: "print(46)",
    HANG: "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\ntime.sleep(600)",
    DIE: "import os\nos.kill(os.getpid(), 9)",
    FLOOD: "print('x' * 2**22)\nraise SystemExit(3)",
}


class CellUser:
    """One of these parts. `start` begins a piece of work: RIGHT, HANG, DIE or FLOOD, and perhaps further words behind it. Its
    future has "right", or says why there is no result."""

    depth = 2
    """Generations between this process and a cell, a process that does the work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._loop = EventLoopThread("cells")
        self._loop.submit(self._open).result(WHOLE_S)

    def start(self, text: str) -> "Future[str]":
        word, _, mark = text.partition(" ")
        return self._loop.submit(lambda: self._work(word, mark))

    def cells(self) -> set[int]:
        return {pid for pid in self.processes() if self._depth_of(pid) == self.depth}

    def fork_servers(self) -> set[int]:
        return {pid for pid in self.processes() if self._depth_of(pid) == 1}

    def processes(self) -> set[int]:
        children = psutil.Process().children(recursive=True)
        return {child.pid for child in children if child.pid not in self._before and is_alive(child.pid)}

    def close(self) -> None:
        self._loop.close(self._close)

    def _depth_of(self, pid: int) -> int:
        try:
            return [parent.pid for parent in psutil.Process(pid).parents()].index(os.getpid()) + 1
        except (psutil.NoSuchProcess, ValueError):
            return 0

    async def _open(self) -> None:
        """Begin."""

    async def _work(self, word: str, mark: str) -> str:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError


class Scorers(CellUser):
    async def _open(self) -> None:
        self.pool = VerifierPool(2, LIMIT_S, score=score_by_text)

    async def _work(self, word: str, mark: str) -> str:
        text = {RIGHT: "4", HANG: f"hang {mark}", DIE: "die", FLOOD: f"reply {'x' * 10_000}"}[word]
        (result,) = await asyncio.wrap_future(self.pool.submit("fake", "4", [[1]], [text]))
        return "right" if result.score == 1.0 else str(result.failure)

    async def _close(self) -> None:
        self.pool.close()


class Programs(CellUser):
    async def _open(self) -> None:
        self.runs = CodeRuns(2)

    async def _work(self, word: str, mark: str) -> str:
        (result,) = await self.runs.run_tests(f"# {mark}\n{_PROGRAMS[word]}", ["assert f(2) == 4"], LIMIT_S)
        return "right" if result.passed else "timeout" if result.seconds > LIMIT_S else "failed"

    async def _close(self) -> None:
        self.runs.close()


class Environments(CellUser):
    async def _open(self) -> None:
        path = self.folder / "does.py"
        path.write_text(_ENVIRONMENT)
        self.spec, self.pool = EnvironmentSpec(f"{path}:Does", "does"), EnvironmentPool(8)

    async def _work(self, word: str, mark: str) -> str:
        lease = await self.pool.lease(self.spec, WHOLE_S)
        try:
            await lease.reset({}, 7, WHOLE_S)
            await lease.step(Turn(f"{word} {mark}"), LIMIT_S)
        except RuntimeError as error:
            return str(error)
        finally:
            self.pool.forget(lease)
        return "right"

    async def _close(self) -> None:
        self.pool.close()


class Tool(CellUser):
    depth = 3

    async def _open(self) -> None:
        self.spec = EnvironmentSpec("python", "python", {"timeout": LIMIT_S, "memory_mb": 2048})
        self.pool = EnvironmentPool(8)

    async def _work(self, word: str, mark: str) -> str:
        lease = await self.pool.lease(self.spec, WHOLE_S)
        try:
            call = ToolCall("python", {"code": f"# {mark}\n{_TOOL[word]}"})
            answer = (await lease.step(Turn("", (call,)), WHOLE_S)).messages[0]["content"]
        except RuntimeError as error:
            return str(error)
        finally:
            await self.pool.give_back(lease)
        return "right" if answer == "46\n" else answer[-100:]

    async def _close(self) -> None:
        self.pool.close()


class Agents(CellUser):
    async def _work(self, word: str, mark: str) -> str:
        program = await Program.start(
            [sys.executable, "-S", "-c", f"# {mark}\n{_AGENTS[word]}"],
            variables={},
            directory="",
            text="",
            timeout_s=LIMIT_S,
        )
        end = await program.wait()
        return "right" if (end.code, end.last_line) == (0, "46") else "timeout" if end.is_late else f"code {end.code}"

    def fork_servers(self) -> set[int]:
        return set()

    async def _close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.1)


class Functions(CellUser):
    def fork_servers(self) -> set[int]:
        return set()

    async def _open(self) -> None:
        path = self.folder / "mine.py"
        path.write_text(_FUNCTION)
        self.functions = RewardFunctions([RewardFunctionSpec(f"{path}:does")], timeout_s=LIMIT_S, num_processes=2)

    async def _work(self, word: str, mark: str) -> str:
        call = RewardCall("", [f"{word} {mark}"], [[1]])
        (result,) = await asyncio.wrap_future(self.functions.submit(call))
        return "right" if result.rewards == [1.0] else result.failure

    async def _close(self) -> None:
        await asyncio.to_thread(self.functions.close)


USERS: dict[str, type[CellUser]] = {
    "scorers": Scorers,
    "programs": Programs,
    "environments": Environments,
    "tool": Tool,
    "agents": Agents,
    "functions": Functions,
}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], limit_s: float = WHOLE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def main() -> None:
    user = USERS[sys.argv[1]](Path(sys.argv[2]))
    global LIMIT_S
    LIMIT_S = 1000.0
    user.start(HANG)
    wait_until(user.cells)
    print("up", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
