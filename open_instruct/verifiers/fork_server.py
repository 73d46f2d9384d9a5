"""The fork server, a process that loads the verifiers, and the scorer processes that it forks.

The fork server never sees a response. It forks a scorer when the parent asks for one, and a scorer goes into its jail before it
sees a response. `scoring_processes.py` is the parent's side of both.
"""

import gc
import json
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.scored_groups import Reading
from open_instruct.system.cells.framing import framed, receive
from open_instruct.system.cells.reaper import die_with_parent, reap
from open_instruct.system.sandbox import (
    Jail,
    be_killed_first,
    has_filters,
    landlock_version,
    limit_resources,
    limit_to_computing,
    python_files,
    restrict_calls,
    restrict_files,
)
from open_instruct.verifiers import code_children
from open_instruct.verifiers.base import VerificationResult
from open_instruct.verifiers.registry import (
    import_verifiers,
    prepare_label,
    prepare_verifier,
)

MAX_REPLY_BYTES = 4096
MAX_FAILURE = 500
"""Longest message of an error, in characters."""
MAX_READING = 120
"""Longest text of a `Reading`, in characters. Both texts fit into a reply, even if each character is escaped."""
ScoreFunction = Callable[[str, object, list[int], str, str | None], VerificationResult]
"""The arguments are a row's `dataset` and ground truth, and a response's token ids, text and prompt."""


@dataclass(frozen=True)
class ForkServerStart:
    """The first message to a fork server."""

    score: ScoreFunction
    ready: tuple[str, ...]
    """Values of the `dataset` column whose verifiers are loaded at once."""
    modules: tuple[str, ...]
    """As `--verifier_modules`."""
    config: VerifierConfig
    jail: Jail
    runs_programs: bool = False
    """Whether the forked processes run programs and their tests (`code_children.py`) instead of scoring."""


def keep(descriptor: int) -> None:
    """Run the fork server. It forks a scorer for every request over the socket, until the socket closes or the parent dies."""
    # Ctrl-C and a job queue's SIGTERM reach the whole process group, but only the parent decides when the fork server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    listener = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    try:
        start: ForkServerStart = connection.recv()
        import_verifiers(start.modules, start.config)
        refusals = _load(start.ready)
        if start.runs_programs:
            code_children.prepare()
        be_killed_first()
        silent = os.open(os.devnull, os.O_WRONLY)
        limit_resources(start.jail)
        if landlock_version():  # missing parts of the jail are skipped; tasks that need all parts are refused elsewhere
            restrict_files(Jail(readable=python_files(["open_instruct", start.score.__module__])))
        gc.collect()
        gc.freeze()  # a garbage collection would copy the pages that scorers share
        connection.send(refusals)
        while True:
            _, descriptors, *_ = socket.recv_fds(listener, 1, 1)
            if not descriptors:
                return
            job = connection.recv()
            reap()
            _prepare(*job)
            fork_server = os.getpid()
            if pid := os.fork():
                os.close(descriptors[0])
                connection.send(pid)
            elif start.runs_programs:
                code_children.serve(fork_server, descriptors[0], silent, start.jail)
            else:
                _become_scorer(fork_server, descriptors[0], silent, start.jail)
                _score(start.score)
    except (EOFError, OSError):
        return


def _load(datasets: Collection[str]) -> dict[str, str]:
    """Load the verifiers for these values of the `dataset` column. Returns the reason for each that cannot be loaded."""
    refusals = {}
    for dataset in datasets:
        try:
            prepare_verifier(dataset)
        except Exception as err:  # a verifier that is broken, or refuses this machine, must not affect other rows
            refusals[dataset] = f"{type(err).__name__}: {err}"
    return refusals


def _prepare(dataset: str, ground_truth: object) -> None:
    """Load what every scorer of such a row needs in the fork server, so that not every scorer has to load it."""
    with suppress(Exception):  # the scorer meets the same error and reports it
        prepare_label(dataset, ground_truth)


def _become_scorer(fork_server: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Make the forked process a scorer: it keeps only the socket, as file descriptor 0, and goes into the jail."""
    try:
        die_with_parent(fork_server)
        os.dup2(descriptor, 0)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if has_filters():
            restrict_calls(jail)
        else:
            limit_to_computing(jail)
    except BaseException:
        os._exit(1)


def _score(score: ScoreFunction) -> None:
    """Score responses until the socket closes."""
    try:
        while True:
            secret, response = pickle.loads(receive(0))
            reply = json.dumps(_score_safely(score, *response))
            os.write(0, framed(f"{secret} {reply}".encode()))
    finally:
        os._exit(0)


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
