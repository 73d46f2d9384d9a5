"""A weight update that cannot proceed hangs for ever."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.engines import weight_update_client
from open_instruct.engines.weight_update_client import WeightUpdateClient

EXHIBIT = Exhibit(
    reports=("huggingface/trl #6796", "huggingface/trl #6797"),
    subject="engines and weights",
    happened="The trainer sat in a collective without a time limit while the engine had failed or could not take part. No "
    "log, no error: the job's own limit ended it, and the cause stood in the log of another process.",
    here="Each call of an update has a time limit for each engine. One that does not answer is named with the call, "
    "the others are released from the collective, and the engine is replaced (`engines/weight_update_client.py`).",
)
LIMIT_S = 0.05
Engines = dict[int, Any]
Outcome = Callable[[Engines], dict[int, str]]
"""The causes of failure by engine."""


class PlayedRay:
    """References are the answers themselves, and the answer `None` never comes."""

    exceptions = weight_update_client.ray.exceptions

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        del num_returns, timeout
        return [ref for ref in refs if ref.answer is not None], [ref for ref in refs if ref.answer is None]

    def get(self, ref: Any, *, timeout: float) -> Any:
        del timeout
        return ref.answer


class Reference(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Engine:
    """Takes part in updates, up to a method at which it hangs."""

    def __init__(self, hangs_at: str = "") -> None:
        self.is_released = False
        self._hangs_at = hangs_at

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._call(method))

    def _call(self, method: str) -> Reference:
        self.is_released |= method == "abort_weight_update"
        return Reference(answer=None if method == self._hangs_at else {})


def check(outcome: Outcome) -> None:
    engines = {0: Engine(), 1: Engine(hangs_at="update_weights"), 2: Engine()}
    failures = outcome(engines)
    assert "did not answer update_weights" in failures[1]
    assert failures.keys() == {0, 1, 2}  # one collective: nobody has the new weights
    assert not failures[0].startswith("did not answer")


def theirs(engines: Engines) -> dict[int, str]:
    answers = {number: engine.update_weights.remote().answer for number, engine in engines.items()}
    return {} if None in answers.values() else {0: "", 1: "", 2: ""}  # {} stands for the wait that never ends


def ours(engines: Engines) -> dict[int, str]:
    client = WeightUpdateClient(engines, workers_per_engine=1, timeout_s=LIMIT_S, in_one_group=True)
    client.begin(1)
    assert client.start()
    client.update_weights({})
    assert client.has_broken_off
    return client.report().failures


def test_wait_for_an_engine_without_a_limit_is_caught() -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(theirs)


def test_engine_that_hangs_is_named_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update_client, "ray", PlayedRay())
    check(ours)
