"""Who gets a place, and when: places for processes, programs and calls, of which only so many may run at once.

No request waits for ever, because of three rules:

    places that a caller keeps are taken all at once, or none         two conversations that need two environments each never
                                                                      hold one each and wait for the other's
    a caller that keeps places and sometimes needs one more           so this place is either free, or in use by a call that
    leaves one place free                                             needs no further place and will end
    callers that keep places go first, the others in order            so they come to their ends and give their places back

With 4 places, a conversation with two games and a calculator begins once 3 places are free. It keeps 2 places, and takes a third
one for each call of the calculator, which it gives back after the call. A conversation that uses only tools keeps no place while
its model speaks.
"""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiter:
    number: int
    must_be_free: int
    turn: "asyncio.Future[None]"
    is_granted: bool = False


class Places:
    """A number of places, shared by all event loops of this process. `async with places:` takes one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_free = limit
        self._lock = threading.Lock()
        self._keepers: deque[_Waiter] = deque()
        """Waiting callers that keep other places."""
        self._newcomers: deque[_Waiter] = deque()

    async def take(self, number: int = 1, *, leaves: int = 0, keeps_others: bool = False) -> None:
        """Wait until `number` places are free, and take them all at once.

        Args:
            leaves: places that must stay free, because the caller will need this many more before it gives `number` back.
            keeps_others: the caller already keeps places, which it gives back only after it got this one, and left one free.
        """
        total = number + leaves
        assert 0 < number <= total <= self.limit, f"{total} places, and there are {self.limit}"
        assert not keeps_others or total == 1, "what is kept is taken at once"
        waiter = _Waiter(number, total, asyncio.get_running_loop().create_future())
        queue = self._keepers if keeps_others else self._newcomers
        with self._lock:
            queue.append(waiter)
            self._grant()
        if waiter.is_granted:
            return
        try:
            await waiter.turn
        except asyncio.CancelledError:
            with self._lock:
                if waiter.is_granted:
                    self.num_free += number
                else:
                    queue.remove(waiter)  # it may have been the first, and have blocked the others
                self._grant()
            raise

    def give_back(self, number: int = 1) -> None:
        with self._lock:
            self.num_free += number
            assert self.num_free <= self.limit, f"{self.num_free} of {self.limit} places are free"
            self._grant()

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def _grant(self) -> None:
        """Give free places to those who wait. The caller holds the lock."""
        for queue in (self._keepers, self._newcomers):
            while queue and queue[0].must_be_free <= self.num_free:
                waiter = queue.popleft()
                with suppress(RuntimeError):  # else the event loop of the waiting caller has been closed
                    waiter.turn.get_loop().call_soon_threadsafe(_wake, waiter.turn)
                    waiter.is_granted = True
                    self.num_free -= waiter.number


def _wake(turn: "asyncio.Future[None]") -> None:
    if not turn.done():  # the waiting caller may have been cancelled meanwhile, and then passes the place on
        turn.set_result(None)
