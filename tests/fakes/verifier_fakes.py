"""Verifiers that misbehave, for test_pool.py. Light to import: the worker processes do it."""

import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable

from open_instruct.system import sandbox
from open_instruct.system.cells.fork_server import CHANNEL
from open_instruct.system.cells.framing import framed
from open_instruct.verifiers.registry import VerificationResult

TAIL = "a" * 64 + "!"


def score_by_text(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None
) -> VerificationResult:
    """Does what the response says, or scores 1 if it is the ground truth."""
    match text.partition(" "):
        case ("hang", _, _):
            time.sleep(1000)
        case ("hang_in_c", _, _):
            # Exponential backtracking: one call into C that holds the interpreter all the while.
            re.match(r"(a|a)*$", TAIL)
        case ("sleep", _, seconds):
            time.sleep(float(seconds))
        case ("raise", _, _):
            raise KeyError("no such thing")
        case ("recurse", _, _):
            return score_by_text(dataset, ground_truth, token_ids, text, query)
        case ("exit", _, _):
            sys.exit(3)
        case ("die", _, _):
            os.kill(os.getpid(), 9)
        case ("too_much", _, _):
            return VerificationResult(1.5)
        case ("memory", _, _):
            len(bytearray(64 << 30))
        case ("print", _, _):
            print("noise")
        case ("reply", _, reply):  # as somebody who has taken the process over
            os.write(CHANNEL, framed(reply.encode()))
            time.sleep(1000)
        case ("answer", _, replies):  # as somebody who has looked around in the process as well
            secret = own_secret()
            os.write(CHANNEL, b"".join(framed(f"{secret} {reply}".encode()) for reply in replies.split("\n")))
            time.sleep(1000)
    return VerificationResult(float(text == ground_truth))


def own_secret() -> str:
    """What the reply to the response that is being scored has to begin with."""
    frame = sys._getframe()
    while "secret" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["secret"]


def score_environment(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None
) -> VerificationResult:
    """1 if the process is as a worker should be."""
    heavy = {"torch", "ray", "vllm", "transformers", "datasets"} & sys.modules.keys()
    assert not heavy, heavy
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert not getattr(sys.modules["__main__"], "__file__", None), "the parent's main module was imported"
    return VerificationResult(1.0)


def score_is_worker(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None
) -> VerificationResult:
    """1 if this process is the one that `ground_truth` names."""
    return VerificationResult(float(os.getpid() == ground_truth))


def score_limits(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None
) -> VerificationResult:
    """1 if the limits hold that every machine has, and the part of the jail that `ground_truth` names."""
    for name, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CPU, 600)):
        assert 0 <= resource.getrlimit(name)[0] <= most
    with contextlib.suppress(PermissionError):
        if ground_truth == "landlock_version":
            os.listdir("/etc")
        else:
            socket.socket()
        return VerificationResult(0.0)
    return VerificationResult(1.0)


def take_away(part: str) -> Callable[..., VerificationResult]:
    """In the process of the verifiers: its kernel seems to lack this part of a jail."""
    setattr(sandbox, part, lambda: 0)
    return score_limits


class Lacking:
    """A score function that comes with a kernel that lacks something."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __reduce__(self) -> tuple:
        return take_away, (self.part,)

    def __call__(self, *_: object) -> VerificationResult:
        raise NotImplementedError


def fail_to_unpickle() -> None:
    raise RuntimeError("not here")


class Unstartable:
    """A score function that no worker can receive."""

    def __reduce__(self) -> tuple:
        return fail_to_unpickle, ()

    def __call__(
        self, dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None
    ) -> VerificationResult:
        return VerificationResult(1.0)
