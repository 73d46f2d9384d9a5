"""Scores one group in a thread of the pool. A slow response does not delay the others, and a crash costs only one response."""

import selectors
import time
from collections import deque
from collections.abc import Callable

from open_instruct.system.cells.cells import UnavailableError
from open_instruct.verifiers.scorers import MAX_FAILURE
from open_instruct.verifiers.scoring_processes import Scored, Scorer, ScoringJob

PATIENCE_S = 0.25
"""A response that takes longer counts as slow. The other responses of its group then no longer wait for it."""
MAX_SIDE_BY_SIDE = 8
"""Scorers of one group that may compute at once after a response of the group was slow. Slow scorers do not count."""
MAX_SLOW = 64
"""Largest number of slow scorers of one group at once."""


class GroupScoring:
    """Has the responses of one group scored: by one scorer in order, and by further scorers in parallel after a slow response."""

    def __init__(
        self,
        job: ScoringJob,
        borrow: Callable[[ScoringJob], "Scorer"],
        give_back: Callable[["Scorer"], None],
        timeout_s: float,
        let_others_on: Callable[[], None],
    ) -> None:
        self._job = job
        self._let_others_on = let_others_on
        self._borrow = borrow
        self._give_back = give_back
        self._timeout_s = timeout_s
        self._waiting = deque(range(len(job.texts)))
        self._scored: list[Scored | None] = [None] * len(job.texts)
        self._crashed: set[int] = set()
        """Responses on which a scorer has ended. Each is tried once more."""
        self._scorers: set[Scorer] = set()
        self._width = 1
        """Scorers that may compute at once; slow ones do not count."""

    def score(self) -> list[Scored]:
        with selectors.PollSelector() as selector:  # unlike epoll, it needs no system calls to open and close
            self._selector = selector
            try:
                self._hand_out()
                while self._scorers:
                    self._take_replies()
                    self._look_at_the_clock()
                    if not self._waiting and self._num_slow() == len(self._scorers) > 0:
                        self._let_others_on()  # the next group need not wait for responses that hang
                    self._hand_out()
            finally:
                for scorer in list(self._scorers):
                    self._end(scorer)
        return [result for result in self._scored if result is not None]

    def _hand_out(self) -> None:
        """Give each idle scorer a response, and borrow more scorers while fewer than `_width` compute."""
        for scorer in [scorer for scorer in self._scorers if scorer.number is None]:
            if self._waiting:
                self._give(scorer)
            else:
                self._leave(scorer)
                self._give_back(scorer)
        while self._waiting and len(self._scorers) - self._num_slow() < self._width and self._num_slow() < MAX_SLOW:
            try:
                scorer = self._borrow(self._job)
            except UnavailableError as err:
                self._give_up(f"unavailable: {err}"[:MAX_FAILURE])
                return
            scorer.cell.connection.settimeout(self._timeout_s)
            self._scorers.add(scorer)
            self._selector.register(scorer.cell.connection, selectors.EVENT_READ, scorer)
            self._give(scorer)

    def _num_slow(self) -> int:
        return sum(scorer.is_slow for scorer in self._scorers)

    def _give(self, scorer: "Scorer") -> None:
        try:
            scorer.send(self._waiting, self._job, limit=len(self._waiting) if self._width == 1 else 1)
        except OSError:  # the scorer has ended, or is stopped and does not read
            self._lose(scorer)

    def _give_up(self, failure: str) -> None:
        for number in self._waiting:
            self._scored[number] = Scored(None, failure)
        self._waiting.clear()

    def _take_replies(self) -> None:
        now = time.monotonic()
        ends = [scorer.since + (self._timeout_s if scorer.is_slow else PATIENCE_S) - now for scorer in self._scorers]
        for key, _ in self._selector.select(max(min(ends, default=0.0), 0.0)):
            scorer: Scorer = key.data
            try:
                for number, result in scorer.receive():
                    self._scored[number] = result
                    if scorer.is_slow:
                        self._end(scorer)
                        break
            except (OSError, EOFError, ValueError, RecursionError):  # the scorer has ended, or its reply is not valid
                self._lose(scorer)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for scorer in [scorer for scorer in self._scorers if scorer.number is not None]:
            assert scorer.number is not None
            if now - scorer.since > self._timeout_s:
                self._scored[scorer.number] = Scored(None, "timeout")
                self._take_back(scorer)
                self._end(scorer)
            elif now - scorer.since > PATIENCE_S and not scorer.is_slow:
                scorer.is_slow = True
                self._take_back(scorer)
                self._width = MAX_SIDE_BY_SIDE

    def _take_back(self, scorer: "Scorer") -> None:
        """Let other scorers score the responses that were sent to this scorer and that it has not begun."""
        while len(scorer.queue) > 1:
            number, _ = scorer.queue.pop()
            self._waiting.appendleft(number)

    def _lose(self, scorer: "Scorer") -> None:
        """Handle a scorer that has ended. Its response is tried once more; after a second loss it is not scored."""
        self._take_back(scorer)
        if (number := scorer.number) in self._crashed:
            self._scored[number] = Scored(None, "crash")
        elif number is not None:
            self._crashed.add(number)
            self._waiting.appendleft(number)
        self._end(scorer)

    def _end(self, scorer: "Scorer") -> None:
        self._leave(scorer)
        scorer.cell.kill()

    def _leave(self, scorer: "Scorer") -> None:
        self._scorers.discard(scorer)
        self._selector.unregister(scorer.cell.connection)
