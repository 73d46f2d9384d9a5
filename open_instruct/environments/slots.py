"""Who may have a process of an environment, and when. Nobody waits for ever, because of three rules:

    what somebody keeps for long is taken at once, all or nothing      two conversations with two environments each can never
                                                                       stand there with one each and wait for the other's
    whoever keeps slots and will want one more for a while leaves      so that one is there for it: free, or in use by somebody
    one free                                                           who wants no further one and ends
    whoever keeps slots goes first, all others in their order          so that it comes to its end, and its slots come back

With 4 slots, a conversation with two games and a calculator begins once 3 are free, keeps 2, and calls the calculator in another
one, which it gives back after the call. A conversation with tools alone keeps nothing while its model speaks.
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
        """Wait for so many slots at once.

        Args:
            leaves: slots that must stay free, because whoever takes these will want so many more before it gives these back.
            keeps_others: whoever asks has taken slots that it will not give back before it has this one, and has left one free.
        """
        wanted = number + leaves
        assert 0 < number <= wanted <= self.limit, f"{wanted} slots, and there are {self.limit}"
        assert not keeps_others or wanted == 1, "what is kept is taken at once"
        waiter = _Waiter(number, wanted, asyncio.get_running_loop().create_future())
        (self._of_keepers if keeps_others else self._of_others).append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._grant()  # it may have been the one that the others waited behind
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
