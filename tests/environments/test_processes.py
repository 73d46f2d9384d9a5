"""The pool of environments' processes: places, who gets them, and what is left. Processes are real."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from open_instruct.environments.base import EnvironmentSpec, ToolCall, Turn
from open_instruct.environments.processes import EnvironmentFailed, EnvironmentPool, Lease

LIMIT_S = 60.0
CALCULATOR, COUNTER = EnvironmentSpec("calculator", "calculator"), EnvironmentSpec("counter", "counter")
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await work

    return asyncio.run(limited())


async def value(lease: Lease, expression: str) -> str:
    said = await lease.step(Turn("", (ToolCall("calculator", {"expression": expression}),)), LIMIT_S)
    return str(said.messages[0]["content"])


def test_whoever_waits_gets_the_process_that_is_given_back() -> None:
    async def work() -> tuple[list[str], int]:
        pool = EnvironmentPool(1)

        async def use(number: int) -> str:
            lease = await pool.lease(CALCULATOR, LIMIT_S)
            said = await value(lease, f"{number} * 10")
            await pool.give_back(lease)
            return said

        said = await asyncio.gather(*map(use, range(8)))
        started = pool.num_processes
        pool.close()
        return said, started

    assert run(work()) == ([str(10 * number) for number in range(8)], 1)


def test_an_idle_process_makes_room_for_another_tool() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        await pool.give_back(await pool.lease(CALCULATOR, LIMIT_S))
        counter = await pool.lease(COUNTER, LIMIT_S)
        assert pool.num_processes == 1
        waiting = asyncio.create_task(pool.lease(CALCULATOR, LIMIT_S))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await pool.give_back(counter)
        assert await value(await waiting, "1 + 1") == "2"
        pool.close()

    run(work())


def test_a_place_is_not_lost_with_a_conversation_that_gives_up_waiting() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        counter = await pool.lease(COUNTER, LIMIT_S)
        waiting = [asyncio.create_task(pool.lease(COUNTER, LIMIT_S)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        pool.forget(counter)  # wakes the second, which is cancelled before it has looked
        waiting[1].cancel()
        assert (await waiting[2]).is_alive
        pool.close()

    run(work())


def test_the_place_of_a_process_that_cannot_be_made_is_free_again() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        wrong = EnvironmentSpec("guess_number", "guess", {"min_val": 5, "max_val": 1})
        for _ in range(3):
            with pytest.raises(EnvironmentFailed, match="max_val must be above min_val"):
                await pool.lease(wrong, LIMIT_S)
        assert await value(await pool.lease(CALCULATOR, LIMIT_S), "2 ** 5") == "32"
        pool.close()

    run(work())


def test_several_processes_come_at_once_and_those_that_fail_leave_no_place_behind() -> None:
    async def work() -> None:
        pool = EnvironmentPool(3)
        wrong = EnvironmentSpec("guess_number", "guess", {"min_val": 5, "max_val": 1})
        for specs in ([wrong, COUNTER, COUNTER], [COUNTER, wrong, COUNTER], [COUNTER, COUNTER, wrong]):
            with pytest.raises(EnvironmentFailed, match="max_val must be above min_val"):
                await pool.lease_all(specs, LIMIT_S)
            assert pool.num_processes == 0
        leases = await pool.lease_all([COUNTER, CALCULATOR, COUNTER], LIMIT_S)
        assert [lease.spec for lease in leases] == [COUNTER, CALCULATOR, COUNTER]
        waiting = asyncio.create_task(pool.lease_all([COUNTER, COUNTER], LIMIT_S))
        await pool.give_back(leases[0])
        await asyncio.sleep(0.2)
        assert (waiting.done(), pool.num_processes) == (False, 2)  # one place is free, and two are needed
        await pool.give_back(leases[1])
        assert len(await waiting) == 2
        assert pool.num_processes == 3  # the calculator has made room
        pool.close()

    run(work())


def test_a_process_is_replaced_in_its_place_while_others_wait() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        lease = await pool.lease(COUNTER, LIMIT_S)
        waiting = asyncio.create_task(pool.lease(COUNTER, LIMIT_S))
        await asyncio.sleep(0)
        lease.kill()
        lease = await pool.replace(lease, LIMIT_S)
        assert lease.is_alive
        assert not waiting.done()
        await pool.give_back(lease)
        assert (await waiting).is_alive
        pool.close()

    run(work())


def test_a_killed_process_frees_its_place_and_the_next_one_works() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        lease = await pool.lease(CALCULATOR, LIMIT_S)
        psutil.Process(lease.cell.pid).kill()
        with pytest.raises(EnvironmentFailed, match="calculator: step"):
            await value(lease, "1")
        await pool.give_back(lease)
        assert await value(await pool.lease(CALCULATOR, LIMIT_S), "1") == "1"
        pool.close()

    run(work())


def test_processes_that_end_while_they_wait_for_calls_fail_no_call() -> None:
    async def work() -> None:
        pool = EnvironmentPool(3)
        leases = [await pool.lease(CALCULATOR, LIMIT_S) for _ in range(3)]
        for lease in leases:
            await pool.give_back(lease)
        for lease in leases[1:]:
            process = psutil.Process(lease.cell.pid)
            process.kill()  # as the kernel does where memory runs out
            await asyncio.to_thread(process.wait, LIMIT_S)
        lease = await pool.lease(CALCULATOR, LIMIT_S)
        assert (lease, await value(lease, "2 + 2")) == (leases[0], "4")
        assert pool.num_processes == 1
        pool.close()

    run(work())


def test_what_environments_with_the_same_arguments_share_is_loaded_once(tmp_path: Path) -> None:
    async def work() -> None:
        pool = EnvironmentPool(5)
        specs = []
        for name in ("red", "blue"):
            (tmp_path / f"{name}.txt").write_text(f"{name} apples\n")
            specs.append(EnvironmentSpec("search", "search", {"index": str(tmp_path / f"{name}.txt")}))
        leases = [await pool.lease(spec, LIMIT_S) for spec in specs]
        for path in tmp_path.iterdir():
            path.unlink()
        leases += [await pool.lease(spec, LIMIT_S) for spec in specs]  # in other processes
        call = Turn("", (ToolCall("search", {"query": "apples"}),))
        said = [(await lease.step(call, LIMIT_S)).messages[0]["content"] for lease in leases]
        assert said == ["red apples", "blue apples"] * 2
        gone = EnvironmentSpec("search", "search", {"index": str(tmp_path / "gone.txt")})
        with pytest.raises(EnvironmentFailed, match="search: make: FileNotFoundError"):
            await pool.lease(gone, LIMIT_S)
        pool.close()

    run(work())


def test_arguments_may_be_long() -> None:
    async def work() -> None:
        pool = EnvironmentPool(1)
        server = {"transport": "stdio", "command": "none", "args": ["x" * 100_000]}
        for _ in range(2):
            lease = await pool.lease(EnvironmentSpec("generic_mcp", "it", server), LIMIT_S)
            assert lease.is_stateless
            pool.forget(lease)
        pool.close()

    run(work())


def test_nothing_is_left_when_the_pool_closes() -> None:
    async def work() -> list[int]:
        pool = EnvironmentPool(4)
        leases = [await pool.lease(COUNTER, LIMIT_S) for _ in range(3)]
        pool.close()
        return [lease.cell.pid for lease in leases]

    for pid in run(work()):
        try:
            psutil.Process(pid).wait(LIMIT_S)
        except psutil.NoSuchProcess:
            continue
