"""What environments start ends with them, by whatever death they end. Processes are real."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from open_instruct.cluster.process_watch import RUN_MARK as MARK_OF_RUNS
from open_instruct.environments.base import EnvironmentSpec, ToolCall, Turn
from open_instruct.environments.mcp_tools import RUN_MARK
from open_instruct.environments.processes import EnvironmentFailed, EnvironmentPool, Lease
from open_instruct.system.cells.reaper import children

LIMIT_S = 60.0
STARTS = """
    import subprocess

    from open_instruct.environments.base import Environment, Observation, Opening, user_message

    HELPER = subprocess.Popen(["sleep", "600"])  # all environments share it


    class Starts(Environment):
        takes_text = True

        async def reset(self, task, seed):
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            child = subprocess.Popen(["sleep", "600"], **quiet)
            leader = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
            told = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE)
            pids = [HELPER.pid, child.pid, leader.pid, int(told.stdout)]
            return Opening([user_message(" ".join(map(str, pids)))])

        async def step(self, turn):
            return Observation()
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "starts.py"
    path.write_text(textwrap.dedent(STARTS))
    return f"{path}:Starts"


def with_pool(work: Callable[[EnvironmentPool], Awaitable[None]]) -> None:
    async def limited() -> None:
        pool = EnvironmentPool(4)
        try:
            async with asyncio.timeout(LIMIT_S):
                await work(pool)
        finally:
            pool.close()

    asyncio.run(limited())


async def begun(pool: EnvironmentPool, target: str) -> tuple[Lease, psutil.Process, list[psutil.Process]]:
    """An environment, the process that all share, and those that it has started itself."""
    lease = await pool.lease(EnvironmentSpec(target, "it"), LIMIT_S)
    said = await lease.reset({}, 7, LIMIT_S)
    helper, *own = [psutil.Process(int(pid)) for pid in said.messages[0]["content"].split()]
    return lease, helper, own


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(processes: list[psutil.Process], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.parametrize("another_begins", [False, True])
def test_an_environment_that_is_killed_between_two_turns_leaves_nothing(target: str, another_begins: bool) -> None:
    async def work(pool: EnvironmentPool) -> None:
        lease, helper, own = await begun(pool, target)
        os.kill(lease.cell.pid, signal.SIGKILL)  # as the kernel does where memory runs out
        of_other = (await begun(pool, target))[2] if another_begins else []
        await asyncio.to_thread(wait_for_end, own)
        with pytest.raises(EnvironmentFailed):
            await lease.step(Turn("hi"), LIMIT_S)
        pool.forget(lease)
        assert is_alive(helper)
        assert all(map(is_alive, of_other))

    with_pool(work)


@pytest.mark.parametrize("ends", ["forget", "give_back"])
def test_an_environment_that_ends_leaves_nothing_in_any_session(target: str, ends: str) -> None:
    async def work(pool: EnvironmentPool) -> None:
        lease, helper, own = await begun(pool, target)
        assert all(map(is_alive, own))
        if ends == "forget":
            pool.forget(lease)
        else:
            await pool.give_back(lease)
        await asyncio.to_thread(wait_for_end, own)
        assert is_alive(helper)

    with_pool(work)


def test_what_a_living_environment_has_sent_to_the_background_lives(target: str) -> None:
    async def work(pool: EnvironmentPool) -> None:
        _, _, own = await begun(pool, target)
        other, _, of_other = await begun(pool, target)
        pool.forget(other)
        await asyncio.to_thread(wait_for_end, of_other)  # so the fork server has looked for what is left over
        assert all(map(is_alive, own))

    with_pool(work)


def test_a_pool_that_closes_leaves_nothing(target: str) -> None:
    left: list[psutil.Process] = []

    async def work(pool: EnvironmentPool) -> None:
        for _ in range(2):
            _, helper, own = await begun(pool, target)
            left.extend([helper, *own])

    with_pool(work)
    wait_for_end(left)


ENGINE = """
    import asyncio, sys
    from open_instruct.environments.base import EnvironmentSpec
    from open_instruct.environments.processes import EnvironmentPool

    async def work():
        pool = EnvironmentPool(4)
        lease = await pool.lease(EnvironmentSpec(sys.argv[1], "it"), 60)
        print((await lease.reset({}, 7, 60)).messages[0]["content"], flush=True)
        await asyncio.sleep(600)

    asyncio.run(work())
"""


def test_an_engine_that_is_killed_leaves_nothing(target: str) -> None:
    engine = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ENGINE), target], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    started = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
    assert len(started) == 4
    engine.kill()
    engine.wait()
    engine.stdout.close()
    wait_for_end(started)


@pytest.mark.parametrize("kernel_lists_children", [True, False])
def test_the_children_of_a_process_are_found_with_any_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel_lists_children: bool
) -> None:
    def listed(path: str) -> list[str]:
        if path == "/proc/self/task" and not kernel_lists_children:
            raise FileNotFoundError(path)
        return list_directory(path)

    list_directory = os.listdir
    monkeypatch.setattr(os, "listdir", listed)
    before = children()
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as child:
        assert children() - before == {child.pid}
        os.killpg(child.pid, signal.SIGKILL)
    assert children() == before


SERVER = """
    import os, sys, time
    from pathlib import Path
    from mcp.server import MCPServer

    server = MCPServer("slow")


    @server.tool()
    def look_up(word: str) -> str:
        "Looks up."
        mark = os.environ.get("OPEN_INSTRUCT_RUN")
        Path(sys.argv[1]).with_suffix(".new").write_text(f"{os.getpid()} {mark}")
        Path(sys.argv[1]).with_suffix(".new").rename(sys.argv[1])
        time.sleep(600)  # as a request without a limit does
        return word


    server.run("stdio")
"""


def test_an_mcp_server_that_hangs_ends_with_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUN_MARK == MARK_OF_RUNS
    monkeypatch.setenv(RUN_MARK, "mine")
    program, told = tmp_path / "server.py", tmp_path / "told"
    program.write_text(textwrap.dedent(SERVER))
    config = {"transport": "stdio", "command": sys.executable, "args": [str(program), str(told)]}

    async def work(pool: EnvironmentPool) -> None:
        lease = await pool.lease(EnvironmentSpec("generic_mcp", "it", config), LIMIT_S)
        step = asyncio.create_task(lease.step(Turn("", (ToolCall("look_up", {"word": "x"}),)), LIMIT_S))
        while not told.exists():
            assert not step.done()
            await asyncio.sleep(0.02)
        pid, mark = told.read_text().split()
        server = psutil.Process(int(pid))
        assert mark == "mine"
        step.cancel()  # the environment is killed, as after a missed deadline
        await asyncio.to_thread(wait_for_end, [server])

    with_pool(work)
