"""Which request gets a process of an environment, and when. No request waits for ever, because of three rules:

    slots that a conversation keeps are taken all at once, or none     two conversations that need two environments each never
                                                                       hold one each and wait for the other's
    a conversation that keeps slots and sometimes needs one more       so this slot is either free, or in use by a call that
    leaves one slot free                                               needs no further slot and will end
    conversations that keep slots go first, the others in order        so they come to their ends and give their slots back

With 4 slots, a conversation with two games and a calculator begins once 3 slots are free. It keeps 2 slots, and takes a third one
for each call of the calculator, which it gives back after the call. A conversation that uses only tools keeps no slot while its
model speaks.
"""

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class _Waiter:
    number: int
    must_be_free: int
    granted: "asyncio.Future[None]"


class Slots:
    """A number of slots in one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_free = limit
        self._of_keepers: deque[_Waiter] = deque()
        self._of_others: deque[_Waiter] = deque()

    async def take(self, number: int = 1, *, leaves: int = 0, keeps_others: bool = False) -> None:
        """Wait until `number` slots are free, and take them all at once.

        Args:
            leaves: slots that must stay free, because the caller will need this many more before it gives `number` back.
            keeps_others: the caller already keeps slots, which it gives back only after it got this one, and left one free.
        """
        total = number + leaves
        assert 0 < number <= total <= self.limit, f"{total} slots, and there are {self.limit}"
        assert not keeps_others or total == 1, "what is kept is taken at once"
        waiter = _Waiter(number, total, asyncio.get_running_loop().create_future())
        (self._of_keepers if keeps_others else self._of_others).append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._grant()  # this request may have been the first in the queue, and have blocked the others
            else:
                self.give_back(number)
            raise

    def give_back(self, number: int = 1) -> None:
        self.num_free += number
        assert self.num_free <= self.limit, f"{self.num_free} of {self.limit} slots are free"
        self._grant()

    def _grant(self) -> None:
        for queue in (self._of_keepers, self._of_others):
            while queue:
                waiter = queue[0]
                if not waiter.granted.done():
                    if waiter.must_be_free > self.num_free:
                        break
                    self.num_free -= waiter.number
                    waiter.granted.set_result(None)
                queue.popleft()
