"""CallLimit that are shared by event loops."""

import asyncio
import threading

import pytest

from open_instruct.verifiers.call_limit import CallLimit


def test_turns_hold_across_event_loops() -> None:
    turns, lock, counts = CallLimit(3), threading.Lock(), [0, 0, 0]

    async def one() -> None:
        async with turns:
            with lock:
                counts[0] += 1
                counts[1] = max(counts[:2])
            await asyncio.sleep(0.001)
            with lock:
                counts[0] -= 1
                counts[2] += 1

    async def many() -> None:
        await asyncio.gather(*(one() for _ in range(100)))

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [0, 3, 400]


def test_a_turn_of_somebody_who_was_cancelled_is_passed_on() -> None:
    async def wait(turns: CallLimit) -> None:
        async with turns:
            pass

    async def cancel(*, when_given: bool) -> None:
        turns = CallLimit(1)
        async with turns:
            first, second = asyncio.create_task(wait(turns)), asyncio.create_task(wait(turns))
            await asyncio.sleep(0)
            if not when_given:
                first.cancel()
        if when_given:
            first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.wait_for(second, 20)
        await asyncio.wait_for(wait(turns), 20)

    asyncio.run(cancel(when_given=False))
    asyncio.run(cancel(when_given=True))


def test_a_loop_that_is_closed_has_no_turn() -> None:
    turns = CallLimit(1)

    async def hold() -> None:
        async with turns:
            pass

    loop = asyncio.new_event_loop()

    async def scenario() -> None:
        async with turns:
            task = loop.create_task(hold())
            await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0, None))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()
        await asyncio.wait_for(hold(), 20)

    asyncio.run(scenario())
