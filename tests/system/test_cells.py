"""Cells, and the process that forks them. Processes are real."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import pytest
from cell_kinds import Doing
from cell_users import is_alive, wait_until

from open_instruct.system.cells.cells import Cell, CellEnded, Cells, UnavailableError
from open_instruct.system.cells.framing import packed
from open_instruct.system.sandbox import missing

LIMIT_S = 60.0
MOST_BYTES = 1000
T = TypeVar("T")
both = pytest.mark.parametrize(
    "is_jailed",
    [False, pytest.param(True, marks=pytest.mark.skipif(bool(missing()), reason="this kernel has no jail"))],
)


@contextmanager
def opened(problem: str = "", *, is_jailed: bool = False) -> Iterator[Cells]:
    cells = Cells(Doing(problem, is_jailed=is_jailed), {"OMP_NUM_THREADS": "1"})
    try:
        yield cells
    finally:
        cells.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await work

    return asyncio.run(limited())


async def ask(cell: Cell, what: str, deadline_s: float = LIMIT_S, **words: Any) -> dict[str, Any]:
    return await cell.ask(packed({"do": what, **words}), deadline_s, most_bytes=MOST_BYTES)


@both
def test_cell_answers_one_message_after_another(is_jailed: bool) -> None:
    async def work() -> None:
        with opened(is_jailed=is_jailed) as cells:
            cell = await cells.fork_async("x" * 1_000_000)  # more than the socket of the fork server holds
            for number in range(3):
                assert await ask(cell, "echo", number=number) == {"do": "echo", "number": number}
            assert cell.is_alive()
            cell.kill()
            cell.kill()
            assert not cell.is_alive()

    run(work())


@both
def test_cell_that_is_late_is_ended(is_jailed: bool) -> None:
    async def work() -> None:
        with opened(is_jailed=is_jailed) as cells:
            cell = await cells.fork_async()
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                await ask(cell, "hang", 0.3)
            assert 0.3 <= time.monotonic() - started < 20.0
            await asyncio.to_thread(wait_until, lambda: not is_alive(cell.pid))

    run(work())


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("half", "its process ended"),
        ("no JSON", "not JSON"),
        ("pickle", "not JSON"),
        ("long", "a message of 2012 bytes"),
        ("crash", "its process ended"),
    ],
)
def test_cell_whose_answer_is_none_is_ended_and_says_why(what: str, why: str) -> None:
    async def work() -> None:
        with opened() as cells:
            cell = await cells.fork_async()
            if what == "crash":
                os.kill(cell.pid, signal.SIGKILL)
            with pytest.raises(CellEnded, match=why):
                await ask(cell, what)
            assert not cell.is_alive()
            assert (await ask(await cells.fork_async(), "echo"))["do"] == "echo"

    run(work())


def test_answer_that_nobody_waits_for_any_more_is_not_read_as_the_next_one() -> None:
    async def work() -> None:
        with opened() as cells:
            cell = await cells.fork_async()
            late = asyncio.create_task(ask(cell, "late", seconds=0.2))
            await asyncio.sleep(0.1)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            await asyncio.sleep(0.3)
            with pytest.raises(CellEnded, match="its process has ended"):
                await ask(cell, "echo")

    run(work())


def test_order_whose_caller_gives_up_leaves_no_cell_and_no_open_file() -> None:
    async def work() -> None:
        with opened() as cells:
            first, fork_server = await cells.fork_async(), psutil.Process(cells.report()["pid"])
            before = len(os.listdir("/proc/self/fd")), 1
            for _ in range(10):
                order = asyncio.create_task(cells.fork_async())
                await asyncio.sleep(0)
                order.cancel()
                await asyncio.gather(order, return_exceptions=True)
            counts = lambda: (len(os.listdir("/proc/self/fd")), len(fork_server.children()))  # noqa: E731
            await asyncio.to_thread(wait_until, lambda: counts() == before, 20.0)
            assert first.is_alive()

    run(work())


def test_what_is_loaded_is_loaded_once_and_orders_reach_their_cells() -> None:
    async def work() -> None:
        with opened() as cells:
            told = [await ask(await cells.fork_async(order), "describe") for order in ("a", "b")]
            assert [facts["order"] for facts in told] == ["a", "b"]
            assert [facts["num_prepared"] for facts in told] == [1, 2]
            assert told[0]["pid"] != told[1]["pid"] != cells.report()["pid"]
            assert told[1]["held"][:4] == [0, 1, 2, 3]
            assert len(told[1]["held"]) == 5  # the list of descriptors itself

    run(work())


@pytest.mark.parametrize(
    ("problem", "why"),
    [("no such file", "ValueError: no such file"), ("ends", "it ended; its standard error says why")],
)
def test_kind_that_cannot_be_loaded_is_tried_twice_and_named(
    problem: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(problem) as cells:
        with pytest.raises(UnavailableError, match=f"no process could be started: {why}"):
            cells.fork()
        assert caplog.text.count("the process that forks doers failed and is started again") == 1


@both
def test_fork_server_that_dies_is_started_again(is_jailed: bool) -> None:
    with opened(is_jailed=is_jailed) as cells:
        before = cells.report()["pid"]
        cell = cells.fork()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not is_alive(cell.pid), 20.0)
        assert cells.fork().is_alive()
        assert cells.report()["pid"] != before


def test_fork_server_that_is_stopped_is_replaced() -> None:
    with opened() as cells:
        before = cells.report()["pid"]
        os.kill(before, signal.SIGSTOP)
        started = time.monotonic()
        assert cells.fork().is_alive()
        assert cells.report()["pid"] != before
        assert time.monotonic() - started < 60.0
        assert not is_alive(before)


def test_order_that_ends_the_fork_server_costs_no_other() -> None:
    with opened() as cells:
        with pytest.raises(UnavailableError, match="it ended"):
            cells.fork("end the fork server")
        assert cells.fork().is_alive()


def test_close_ends_everything_at_once_also_while_the_code_loads() -> None:
    with opened() as cells:
        pids = [cells.report()["pid"], *(cells.fork().pid for _ in range(3))]
    wait_until(lambda: not any(map(is_alive, pids)), 5.0)
    with pytest.raises(RuntimeError):
        cells.fork()
    failures: list[Exception] = []

    def wait_for_cell(cells: Cells) -> None:
        try:
            cells.fork()
        except Exception as error:
            failures.append(error)

    with opened("hangs") as cells:
        waiting = threading.Thread(target=wait_for_cell, args=(cells,))
        waiting.start()
        time.sleep(0.3)
        started = time.monotonic()
    waiting.join(20.0)
    assert time.monotonic() - started < 5.0
    assert isinstance(failures[0], RuntimeError)
