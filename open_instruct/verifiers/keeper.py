"""The keeper of the verifiers and its scorers, in processes of their own.

The keeper loads the verifiers and never sees a response. It forks a scorer for whoever asks, and a scorer goes into its jail
before it sees a response. The parent's side of both is `scoring_processes.py`.
"""

import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from open_instruct.verifiers.sandbox import (
    Jail,
    be_killed_first,
    die_with_parent,
    has_filters,
    landlock_version,
    limit_resources,
    limit_to_computing,
    python_files,
    restrict_calls,
    restrict_files,
)
from open_instruct.verifiers.verifiers import (
    VerificationResult,
    import_verifiers,
    prepare_label,
    prepare_verifier,
)

MAX_REPLY_BYTES = 4096
MAX_FAILURE = 500
"""Longest text of an error, in characters."""
ScoreFunction = Callable[[str, object, list[int], str, str | None], VerificationResult]
"""Of a row's `dataset` and ground truth, and of a response's token ids, text and prompt."""


@dataclass(frozen=True)
class KeeperStart:
    """What a keeper is started with."""

    score: ScoreFunction
    ready: tuple[str, ...]
    modules: tuple[str, ...]
    jail: Jail


def keep(descriptor: int) -> None:
    """The keeper: forks a scorer for whoever asks over the socket, until that closes, which the parent's death does."""
    # Ctrl-C and a job queue's SIGTERM reach the whole process group; when the keeper ends is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    listening = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    try:
        start: KeeperStart = connection.recv()
        import_verifiers(start.modules)
        refused = _load(start.ready)
        be_killed_first()
        silent = os.open(os.devnull, os.O_WRONLY)
        limit_resources(start.jail)
        if landlock_version():  # each part for itself: tasks that need all of them are refused where one is missing
            restrict_files(Jail(readable=python_files(["open_instruct", start.score.__module__])))
        gc.collect()
        gc.freeze()  # collecting would copy the pages that scorers share
        connection.send(refused)
        while True:
            _, descriptors, *_ = socket.recv_fds(listening, 1, 1)
            if not descriptors:
                return
            job = connection.recv()
            _reap()
            _prepare(*job)
            keeper = os.getpid()
            if pid := os.fork():
                os.close(descriptors[0])
                connection.send(pid)
            else:
                _become_scorer(keeper, descriptors[0], silent, start.jail)
                _score(start.score)
    except (EOFError, OSError):
        return


def _load(datasets: Collection[str]) -> dict[str, str]:
    """Load the verifiers of these `dataset` columns; those that cannot be loaded, and why."""
    refused = {}
    for dataset in datasets:
        try:
            prepare_verifier(dataset)
        except Exception as err:  # one that is broken, or refuses this machine, costs the rows of the others nothing
            refused[dataset] = f"{type(err).__name__}: {err}"
    return refused


def _reap() -> None:
    """Take leave of scorers that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prepare(dataset: str, ground_truth: object) -> None:
    """Load here what every scorer of such a row needs, so that not each of them does."""
    with suppress(Exception):  # the scorers meet it again and report it
        prepare_label(dataset, ground_truth)


def _become_scorer(keeper: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Keep nothing but the socket, as number 0, and nowhere to go."""
    try:
        die_with_parent(keeper)
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
    """Score what comes until nothing comes any more."""
    try:
        while True:
            response = pickle.loads(_read(struct.unpack("!Q", _read(8))[0]))
            reply = json.dumps(_score_safely(score, *response))
            os.write(0, reply.encode() + b"\n")
    finally:
        os._exit(0)


def _read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _score_safely(score: ScoreFunction, *response: Any) -> tuple[float, str | None, float]:
    """Score, failure and cost: the fields of `Scored`."""
    try:
        result = score(*response)
        return result.score, None, result.cost
    except MemoryError:  # nothing is known of such an answer: as if the process had been killed for it
        os._exit(1)
    except Exception as err:  # isolation is what this process is for: the error is reported, counted and scores 0
        return 0.0, f"error: {type(err).__name__}: {err}"[:MAX_FAILURE], 0.0
