"""The scoring of one group, in a thread of the pool: slow responses hold up nobody, and a crash costs one response."""

import selectors
import time
from collections import deque
from collections.abc import Callable

from open_instruct.verifiers.keeper import MAX_FAILURE
from open_instruct.verifiers.scoring_processes import Scored, Scorer, ScoringJob, UnavailableError

PATIENCE_S = 0.25
"""After this long the others of a group stop waiting for a response."""
MAX_SIDE_BY_SIDE = 8
"""Scorers of one group that compute, once one of its responses was slow; those that are slow themselves do not count."""
MAX_SLOW = 64
"""Slow scorers of one group that there may be at once."""


class GroupScoring:
    """Has the responses of one group scored: by one scorer in order, and by further ones beside it where it is held up."""

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
        """Responses that a scorer did not survive once."""
        self._scorers: set[Scorer] = set()
        self._width = 1

    def score(self) -> list[Scored]:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            try:
                while self._waiting or self._scorers:
                    self._hand_out()
                    self._take_replies()
                    self._look_at_the_clock()
                    if not self._waiting and self._num_slow() == len(self._scorers):
                        self._let_others_on()  # the next group need not wait for what hangs
            finally:
                for scorer in list(self._scorers):
                    self._end(scorer)
        return [one for one in self._scored if one is not None]

    def _hand_out(self) -> None:
        """Give each idle scorer a response, and make more scorers while fewer than wanted are at work."""
        for scorer in [one for one in self._scorers if one.number is None]:
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
            scorer.socket.settimeout(self._timeout_s)
            self._scorers.add(scorer)
            self._selector.register(scorer.socket, selectors.EVENT_READ, scorer)
            self._give(scorer)

    def _num_slow(self) -> int:
        return sum(scorer.is_slow for scorer in self._scorers)

    def _give(self, scorer: "Scorer") -> None:
        number = self._waiting.popleft()
        try:
            scorer.send(number, self._job)
        except OSError:  # it has ended, or is stopped and takes nothing
            self._lose(scorer)

    def _give_up(self, failure: str) -> None:
        for number in self._waiting:
            self._scored[number] = Scored(None, failure)
        self._waiting.clear()

    def _take_replies(self) -> None:
        now = time.monotonic()
        ends = [one.since + (self._timeout_s if one.is_slow else PATIENCE_S) - now for one in self._scorers]
        for key, _ in self._selector.select(max(min(ends, default=0.0), 0.0)):
            scorer: Scorer = key.data
            try:
                scored = scorer.receive()
            except (OSError, ValueError, RecursionError):  # it has ended, or says what no scorer says
                self._lose(scorer)
                continue
            if scored is not None and scorer.number is not None:
                self._scored[scorer.number] = scored
                scorer.number = None
                if scorer.is_slow:
                    self._end(scorer)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for scorer in [one for one in self._scorers if one.number is not None]:
            assert scorer.number is not None
            if now - scorer.since > self._timeout_s:
                self._scored[scorer.number] = Scored(None, "timeout")
                self._end(scorer)
            elif now - scorer.since > PATIENCE_S and not scorer.is_slow:
                scorer.is_slow = True
                self._width = MAX_SIDE_BY_SIDE

    def _lose(self, scorer: "Scorer") -> None:
        """A scorer is gone: its response is tried once more."""
        number = scorer.number
        assert number is not None
        if number in self._crashed:
            self._scored[number] = Scored(None, "crash")
        else:
            self._crashed.add(number)
            self._waiting.appendleft(number)
        self._end(scorer)

    def _end(self, scorer: "Scorer") -> None:
        self._leave(scorer)
        scorer.kill()

    def _leave(self, scorer: "Scorer") -> None:
        self._scorers.discard(scorer)
        self._selector.unregister(scorer.socket)
