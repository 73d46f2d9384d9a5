"""How busy the engines are, from one look to the next."""

from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.run import engine_activity
from open_instruct.run.engine_activity import EngineActivity


class PlayedRay:
    """Answers at once. `None` is an engine that does not answer, an error one that has died."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=ConnectionError)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref is not None], []

    def get(self, ref: Any, **_: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref


def engine(answer: Any) -> Any:
    return SimpleNamespace(take_inventory=SimpleNamespace(remote=lambda: answer))


def inventory(busy_s: float, num_tokens: int) -> dict[str, float]:
    told = {"busy_s": busy_s, "num_generated_tokens": num_tokens}
    return told | {"num_sleeps": 2, "asleep_s": 3.0, "memory_released_bytes": 100}


def test_shares_and_rates_are_those_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(engine_activity, "ray", PlayedRay())
    monkeypatch.setattr(engine_activity, "time", SimpleNamespace(monotonic=lambda: clock.now))
    activity = EngineActivity()
    first = {0: engine(inventory(5.0, 1000)), 1: engine(inventory(9.0, 50))}
    assert activity.metrics(first) == {}  # nothing to compare with
    clock.now = 14.0
    then = {
        0: engine(inventory(8.0, 1400)),
        1: engine(inventory(1.0, 10)),
        2: engine(None),
        3: engine(ConnectionError()),
    }
    assert activity.metrics(then) == {
        "engines/busy_share": 3 / 4,  # engine 1 is another since then
        "engines/tokens_per_second": 100.0,
        "engines/num_sleeps": 4,
        "engines/asleep_s": 6.0,
        "memory/engines_released_bytes": 200,
    }
    assert activity.metrics({}) == {}


def test_an_engine_that_has_computed_for_longer_than_the_one_before_it_is_another_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one before it had made its tokens in a short life."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(engine_activity, "ray", PlayedRay())
    monkeypatch.setattr(engine_activity, "time", SimpleNamespace(monotonic=lambda: clock.now))
    activity = EngineActivity()
    activity.metrics({0: engine(inventory(1.0, 500)), 1: engine(inventory(1.0, 500))})
    clock.now = 20.0
    metrics = activity.metrics({0: engine(inventory(9.0, 100)), 1: engine(inventory(6.0, 700))})
    assert metrics["engines/busy_share"] == 0.5
    assert metrics["engines/tokens_per_second"] == 20.0
