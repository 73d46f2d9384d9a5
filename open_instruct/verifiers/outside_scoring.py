"""Scores responses by verifiers that ask a server or start processes of their own: hundreds at once, in one thread."""

import asyncio
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress

from open_instruct.verifiers.base import NotScored, VerifierFunction
from open_instruct.verifiers.keeper import MAX_FAILURE
from open_instruct.verifiers.scoring_processes import Scored, ScoringJob

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that calls have to end after the pool is closed."""


class OutsideScoring:
    """Awaits `VerifierFunction.async_call` for whole groups. The thread with the event loop starts at the first group.

    Args:
        timeout_s: seconds that one response may take, where its verifier does not say.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._used: set[VerifierFunction] = set()

    def submit(self, verifier: VerifierFunction, job: ScoringJob) -> Future[list[Scored]]:
        """A future of the scores of the group's responses, in order. It raises `RuntimeError` once this is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers-outside", daemon=True)
                self._thread.start()
            self._used.add(verifier)
            return asyncio.run_coroutine_threadsafe(self._score_group(verifier, job), self._loop)

    def close(self) -> None:
        """Cancel what is not scored yet, so that servers and processes are let go, and end the thread."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end(self._used), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)
        if not thread.is_alive():
            loop.close()

    async def _score_group(self, verifier: VerifierFunction, job: ScoringJob) -> list[Scored]:
        calls = (self._score(verifier, job, number) for number in range(len(job.texts)))
        return list(await asyncio.gather(*calls))

    async def _score(self, verifier: VerifierFunction, job: ScoringJob, number: int) -> Scored:
        timeout_s = verifier.outside_timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result = await verifier.async_call(
                    job.token_ids[number], job.texts[number], job.ground_truth, job.query
                )
        except TimeoutError:
            return Scored(None, "timeout")
        except NotScored as error:
            return Scored(None, f"unavailable: {error}"[:MAX_FAILURE])
        except Exception as error:  # whatever a user's verifier raises costs one response
            return Scored(None, f"error: {type(error).__name__}: {error}"[:MAX_FAILURE])
        return Scored(result.score, None, result.cost)


async def _end(verifiers: Iterable[VerifierFunction]) -> None:
    """Cancel all other tasks of this loop, and let the verifiers close what they have opened."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(verifier.close() for verifier in verifiers), return_exceptions=True)
