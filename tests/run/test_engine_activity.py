"""How busy the engines are, from one look to the next."""

from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.run import engine_activity
from open_instruct.run.engine_activity import NUM_CALLS, EngineActivity


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


@pytest.mark.parametrize("num_calls", [NUM_CALLS - 1, NUM_CALLS])
def test_the_slowest_engine_is_compared_with_the_median_of_all_over_twenty_calls(
    monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """Three engines that work all the time, at 100, 90 and 30 tokens a second. The last finishes a group at every third call."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_activity, "ray", PlayedRay())
    monkeypatch.setattr(engine_activity, "time", SimpleNamespace(monotonic=lambda: clock.now))
    activity = EngineActivity()
    metrics: dict[str, float] = {}
    for call in range(num_calls + 1):
        clock.now = 10.0 * call
        numbers = {0: 1000 * call, 1: 900 * call, 2: 1000 * (call // 3)}
        metrics = activity.metrics({number: engine(inventory(clock.now, num)) for number, num in numbers.items()})
    expected = {"engines/slowest_share": 6000 / 200 / 90} if num_calls == NUM_CALLS else {}  # 6 groups in 20 calls
    shares = {name: value for name, value in metrics.items() if name == "engines/slowest_share"}
    assert shares == pytest.approx(expected)
    clock.now += 10.0
    alone = {0: engine(inventory(clock.now, 1000 * (num_calls + 1)))}
    assert "engines/slowest_share" not in activity.metrics(alone)


def test_an_engine_that_was_replaced_is_compared_only_after_twenty_calls_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine before it was slow, and the new one counts from 0."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_activity, "ray", PlayedRay())
    monkeypatch.setattr(engine_activity, "time", SimpleNamespace(monotonic=lambda: clock.now))
    activity = EngineActivity()
    shares = []
    for call in range(2 * NUM_CALLS + 2):
        clock.now = 10.0 * call
        new_call = call - NUM_CALLS - 1
        second = inventory(clock.now, 10 * call) if new_call < 0 else inventory(10.0 * new_call, 1000 * new_call)
        metrics = activity.metrics({0: engine(inventory(clock.now, 1000 * call)), 1: engine(second)})
        shares.append(metrics.get("engines/slowest_share"))
    assert shares[NUM_CALLS] == pytest.approx(1 / 50.5)  # 1 and 100 tokens a second, with the median 50.5
    assert shares[NUM_CALLS + 1 : -1] == [None] * NUM_CALLS
    assert shares[-1] == 1.0


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
