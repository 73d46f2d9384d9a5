"""What a scorer does: the cell that scores responses. `scoring_processes.py` is the owner's side of it."""

import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.scored_groups import Reading
from open_instruct.system.cells.fork_server import CHANNEL, CellKind
from open_instruct.system.cells.framing import framed, receive, send
from open_instruct.system.sandbox import Jail
from open_instruct.verifiers.base import VerificationResult
from open_instruct.verifiers.registry import import_verifiers, prepare_label, prepare_verifier

MAX_REPLY_BYTES = 4096
MAX_FAILURE = 500
"""Longest message of an error, in characters."""
MAX_READING = 120
"""Longest text of a `Reading`, in characters. Both texts fit into a reply, even if each character is escaped."""
ScoreFunction = Callable[[str, object, list[int], str, str | None], VerificationResult]
"""The arguments are a row's `dataset` and ground truth, and a response's token ids, text and prompt."""


@dataclass(eq=False)
class Scoring(CellKind):
    """Scorers. An order is a row's `dataset` and ground truth."""

    score: ScoreFunction
    ready: tuple[str, ...]
    """Values of the `dataset` column whose verifiers are loaded at once."""
    modules: tuple[str, ...]
    """As `--verifier_modules`."""
    config: VerifierConfig
    jail: Jail | None
    name = "scorers"

    def load(self) -> dict[str, str]:
        """Load the verifiers. Returns the reason for each value of `ready` whose verifier cannot be loaded."""
        import_verifiers(self.modules, self.config)
        refusals = {}
        for dataset in self.ready:
            try:
                prepare_verifier(dataset)
            except Exception as err:  # a verifier that is broken, or refuses this machine, must not affect other rows
                refusals[dataset] = f"{type(err).__name__}: {err}"
        return refusals

    def read_modules(self) -> list[str]:
        return ["open_instruct", self.score.__module__]

    def prepare(self, order: tuple[str, object]) -> bool:
        """Load what every scorer of such a row needs, so that not every scorer has to load it."""
        with suppress(Exception):  # the scorer meets the same error and reports it
            prepare_label(*order)
        return False

    def serve(self) -> None:
        """Score responses, each with a secret that its reply must begin with."""
        while True:
            secret, response = pickle.loads(receive(CHANNEL))
            reply = json.dumps(_score_safely(self.score, *response))
            send(CHANNEL, framed(f"{secret} {reply}".encode()))


def reading_of(result: VerificationResult) -> Reading:
    """What the result says of the response, with texts of bounded length. Anything but a text is shown as Python writes it."""
    return Reading(_bounded(result.answer), _bounded(result.reasoning))


def _bounded(text: object) -> str | None:
    whole = None if text is None else str(text)
    return whole if whole is None or len(whole) <= MAX_READING else f"{whole[: MAX_READING - 1]}…"


def _score_safely(
    score: ScoreFunction, *response: Any
) -> tuple[float | None, str | None, float, str | None, str | None]:
    """Score, failure, cost, and the two texts of a `Reading`."""
    try:
        result = score(*response)
        reading = reading_of(result)
        return result.score, None, result.cost, reading.answer, reading.reasoning
    except MemoryError:  # not scored, as if the kernel had killed the process for its memory
        os._exit(1)
    except Exception as err:  # this process exists to isolate errors, so the error is reported and counted
        return None, f"error: {type(err).__name__}: {err}"[:MAX_FAILURE], 0.0, None, None
