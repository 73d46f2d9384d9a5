"""Who gets a slot of the pool, and when. There are no processes here."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from open_instruct.environments.slots import Slots

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
        slots = Slots(3)
        await slots.take(2)
        both, one = asyncio.create_task(slots.take(2)), asyncio.create_task(slots.take())
        await settle()
        assert (both.done(), one.done(), slots.num_free) == (False, False, 1)  # the later one does not go first
        slots.give_back()
        await settle()
        assert (both.done(), one.done(), slots.num_free) == (True, False, 0)
        slots.give_back()
        await one

    run(work)


def test_the_last_place_stays_free_for_those_that_want_one_more() -> None:
    async def work() -> None:
        slots = Slots(3)
        await slots.take(1, leaves=1)
        await slots.take(1, leaves=1)
        third = asyncio.create_task(slots.take(1, leaves=1))
        await settle()
        assert not third.done()
        await slots.take(keeps_others=True)  # goes before the third, which keeps nothing yet
        assert slots.num_free == 0
        slots.give_back()
        await settle()
        assert (third.done(), slots.num_free) == (False, 1)
        slots.give_back()
        await third

    run(work)


def test_more_places_than_there_are_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="3 slots, and there are 2"):
        run(lambda: Slots(2).take(2, leaves=1))


@pytest.mark.parametrize("is_granted", [False, True])
def test_whoever_gives_up_waiting_is_in_nobodys_way(is_granted: bool) -> None:
    async def work() -> None:
        slots = Slots(3)
        await slots.take(2)
        first, second = asyncio.create_task(slots.take(3)), asyncio.create_task(slots.take())
        await settle()
        assert not second.done()
        if is_granted:  # it is its turn, and it is cancelled before it has looked
            slots.give_back(2)
        first.cancel()
        await second
        assert slots.num_free == (2 if is_granted else 0)

    run(work)


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_conversations_of_all_kinds_come_to_their_end(limit: int) -> None:
    """Some keep environments and call tools, some only keep environments, some only call tools."""
    most_busy = 0

    async def talk(slots: Slots, seed: int) -> None:
        nonlocal most_busy
        chance = random.Random(seed)
        num_kept, has_tools = chance.randint(0, limit), chance.random() < 0.7
        num_kept -= num_kept == limit and has_tools
        if num_kept:
            await slots.take(num_kept, leaves=int(has_tools))
        for _ in range(3):
            await asyncio.sleep(0)  # the model speaks
            if has_tools:
                await slots.take(keeps_others=bool(num_kept))
                most_busy = max(most_busy, limit - slots.num_free)
                await asyncio.sleep(0)
                slots.give_back()
        if num_kept:
            slots.give_back(num_kept)

    async def work() -> None:
        slots = Slots(limit)
        await asyncio.gather(*(talk(slots, seed) for seed in range(300)))
        assert slots.num_free == limit

    run(work)
    assert most_busy == limit
