"""Scores responses with verifiers that ask a server or start their own processes, hundreds at once in one thread."""

import asyncio
from concurrent.futures import Future

from open_instruct.system.event_loop_thread import EventLoopThread
from open_instruct.verifiers.base import NotScored, VerifierFunction, is_a_result
from open_instruct.verifiers.scorers import MAX_FAILURE, reading_of
from open_instruct.verifiers.scoring_processes import Scored, ScoringJob


class OutsideScoring:
    """Awaits `VerifierFunction.async_call` for whole groups.

    Args:
        timeout_s: seconds that one response may take, unless its verifier sets a limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls = EventLoopThread("verifiers-outside")
        self._used: set[VerifierFunction] = set()

    def submit(self, verifier: VerifierFunction, job: ScoringJob) -> Future[list[Scored]]:
        """A future of the scores of the group's responses, in order. Raises `RuntimeError` after `close`."""
        future = self._calls.submit(lambda: self._score_group(verifier, job))
        self._used.add(verifier)
        return future

    def close(self) -> None:
        """Cancel all open calls, so that servers and processes are released, and end the thread."""
        self._calls.close(self._close_verifiers)

    async def _close_verifiers(self) -> None:
        await asyncio.gather(*(verifier.close() for verifier in self._used), return_exceptions=True)

    async def _score_group(self, verifier: VerifierFunction, job: ScoringJob) -> list[Scored]:
        calls = (self._score(verifier, job, number) for number in range(len(job.texts)))
        return list(await asyncio.gather(*calls))

    async def _score(self, verifier: VerifierFunction, job: ScoringJob, number: int) -> Scored:
        timeout_s = verifier.outside_timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result = await verifier.async_call(
                    job.token_ids[number], job.texts[number], job.ground_truth, job.queries[number]
                )
                result = is_a_result(result)
        except TimeoutError:
            return Scored(None, "timeout")
        except NotScored as error:
            return Scored(None, f"unavailable: {error}"[:MAX_FAILURE], error.cost)
        except Exception as error:  # any error of a user's verifier costs only one response
            return Scored(None, f"error: {type(error).__name__}: {error}"[:MAX_FAILURE])
        return Scored(result.score, None, result.cost, reading_of(result))
