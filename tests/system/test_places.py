"""Who gets a place, and when. There are no processes here."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from open_instruct.system.cells.places import Places

LIMIT_S = 30.0


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    asyncio.run(limited())


async def settle() -> None:
    """Until everything that can happen without anybody's doing has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_several_places_are_given_at_once_and_in_order() -> None:
    async def work() -> None:
        places = Places(3)
        await places.take(2)
        both, one = asyncio.create_task(places.take(2)), asyncio.create_task(places.take())
        await settle()
        assert (both.done(), one.done(), places.num_free) == (False, False, 1)  # the later one does not go first
        places.give_back()
        await settle()
        assert (both.done(), one.done(), places.num_free) == (True, False, 0)
        places.give_back()
        await one

    run(work)


def test_the_last_place_stays_free_for_those_that_want_one_more() -> None:
    async def work() -> None:
        places = Places(3)
        await places.take(1, leaves=1)
        await places.take(1, leaves=1)
        third = asyncio.create_task(places.take(1, leaves=1))
        await settle()
        assert not third.done()
        await places.take(keeps_others=True)  # goes before the third, which keeps nothing yet
        assert places.num_free == 0
        places.give_back()
        await settle()
        assert (third.done(), places.num_free) == (False, 1)
        places.give_back()
        await third

    run(work)


def test_more_places_than_there_are_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="3 places, and there are 2"):
        run(lambda: Places(2).take(2, leaves=1))


@pytest.mark.parametrize("is_granted", [False, True])
def test_whoever_gives_up_waiting_is_in_nobodys_way(is_granted: bool) -> None:
    async def work() -> None:
        places = Places(3)
        await places.take(2)
        first, second = asyncio.create_task(places.take(3)), asyncio.create_task(places.take())
        await settle()
        assert not second.done()
        if is_granted:  # it is its turn, and it is cancelled before it has looked
            places.give_back(2)
        first.cancel()
        await second
        assert places.num_free == (2 if is_granted else 0)

    run(work)


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_conversations_of_all_kinds_come_to_their_end(limit: int) -> None:
    """Some keep environments and call tools, some only keep environments, some only call tools."""
    most_busy = 0

    async def talk(places: Places, seed: int) -> None:
        nonlocal most_busy
        chance = random.Random(seed)
        num_kept, has_tools = chance.randint(0, limit), chance.random() < 0.7
        num_kept -= num_kept == limit and has_tools
        if num_kept:
            await places.take(num_kept, leaves=int(has_tools))
        for _ in range(3):
            await asyncio.sleep(0)  # the model speaks
            if has_tools:
                await places.take(keeps_others=bool(num_kept))
                most_busy = max(most_busy, limit - places.num_free)
                await asyncio.sleep(0)
                places.give_back()
        if num_kept:
            places.give_back(num_kept)

    async def work() -> None:
        places = Places(limit)
        await asyncio.gather(*(talk(places, seed) for seed in range(300)))
        assert places.num_free == limit

    run(work)
    assert most_busy == limit


def test_limit_holds_across_event_loops() -> None:
    places, lock, counts = Places(3), threading.Lock(), [0, 0, 0]

    async def one() -> None:
        async with places:
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


def test_place_of_a_caller_that_is_cancelled_is_passed_on() -> None:
    async def wait(places: Places) -> None:
        async with places:
            pass

    async def cancel(*, when_given: bool) -> None:
        places = Places(1)
        async with places:
            first, second = asyncio.create_task(wait(places)), asyncio.create_task(wait(places))
            await asyncio.sleep(0)
            if not when_given:
                first.cancel()
        if when_given:
            first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.wait_for(second, 20)
        await asyncio.wait_for(wait(places), 20)

    asyncio.run(cancel(when_given=False))
    asyncio.run(cancel(when_given=True))


def test_event_loop_that_is_closed_gets_no_place() -> None:
    places = Places(1)

    async def hold() -> None:
        async with places:
            pass

    loop = asyncio.new_event_loop()

    async def scenario() -> None:
        async with places:
            task = loop.create_task(hold())
            await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0, None))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()
        await asyncio.wait_for(hold(), 20)

    asyncio.run(scenario())
