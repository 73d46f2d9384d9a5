"""Retries, versions and replacements, with engines and learners that are played."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct.failures import ComponentDied
from open_instruct.parameter_synchronizer import ParameterSynchronizer
from open_instruct.weight_sync import UpdateReport


class FakeSupervisor:
    def __init__(self, num_engines: int) -> None:
        self.serving: dict[int, str] = {}
        self.ready: list[int] = []
        self.replaced: list[tuple[int, str]] = []
        self.num_restarts = 0
        self.needs_weights = False
        self.num_engines = num_engines
        self.restarts_left = 10

    def serve(self, numbers: list[int]) -> None:
        for number in numbers:
            self.serving[number] = f"engine {number}"
        self.ready = [number for number in self.ready if number not in numbers]

    def newly_ready(self) -> list[int]:
        return self.ready

    def replace(self, number: int, cause: str) -> None:
        if self.restarts_left == 0:
            raise ComponentDied(cause)
        self.restarts_left -= 1
        self.num_restarts += 1
        self.replaced.append((number, cause))
        del self.serving[number]


class Play:
    """Learners whose updates go as the test says: one dict of failures by engine for each attempt."""

    def __init__(self, *attempts: dict[int, str], num_engines: int = 2, **options: Any) -> None:
        self.supervisor = FakeSupervisor(num_engines)
        self.attempts = list(attempts)
        self.sent: list[tuple[int, list[int]]] = []
        self.num_connections = 0
        self.dying: set[int] = set()
        self.manager = SimpleNamespace(rollout_engines=[f"engine {number}" for number in range(num_engines)])
        self.group = SimpleNamespace(
            async_update_weights=self.update, async_init_weight_update_connections=self.connect
        )
        self.sync = ParameterSynchronizer(make_args(sync_retry_delay=0.0, **options), self)

    def start(self) -> "Play":
        self.supervisor.serve(list(range(self.supervisor.num_engines)))
        return self

    def connect(self, engines: list[Any]) -> list[Any]:
        self.num_connections += 1
        return []

    def update(self, version: int, engines: list[int]) -> list[UpdateReport]:
        self.sent.append((version, list(engines)))
        failures = {n: why for n, why in (self.attempts.pop(0) if self.attempts else {}).items() if n in engines}
        confirmed = {number: version for number in engines if number not in failures}
        return [UpdateReport(confirmed, failures, dict.fromkeys(confirmed, 0.25))]

    def wait(self, refs: Any, **_: Any) -> Any:
        return refs

    def check_health(self) -> None:
        for number in list(self.dying):
            self.supervisor.replace(number, "died")
            self.dying.discard(number)


def test_the_first_sync_makes_the_group_and_reaches_everyone() -> None:
    play = Play()
    assert not play.sync.sync_group_initialized
    report = play.sync.sync(0)
    assert (play.num_connections, play.sent) == (1, [(0, [0, 1])])
    assert report.pauses_s == [0.25, 0.25]


def test_only_those_that_failed_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    play = Play({1: "slow"}, {1: "slow"}).start()
    with caplog.at_level(logging.INFO):
        play.sync.sync(4)
    assert play.sent == [(4, [0, 1]), (4, [1]), (4, [1])]
    statistics = play.sync.get_statistics()
    assert (statistics["current_param_version"], statistics["param_sync_count"], statistics["sync_failures"]) == (
        4,
        1,
        2,
    )
    assert play.supervisor.replaced == []
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:4] == [
        "Syncing parameters to rollouter, version: 4",
        "Sync attempt 1 failed: engine 1: slow",
        "Retrying sync in 0s...",
        "Sync attempt 2 failed: engine 1: slow",
    ]
    assert messages[-1].startswith("Parameter sync completed in 0.0")
    assert messages[-1].endswith("s, version: 4")


def test_one_that_stays_behind_is_replaced_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(*[{1: "deaf"}] * 3, max_sync_retries=2).start()
    play.sync.sync(4)
    assert play.sent == [(4, [0, 1]), (4, [1]), (4, [1])]
    assert play.supervisor.replaced == [(1, "did not take version 4: deaf")]
    assert "All sync attempts failed. Total failures: 3" in caplog.text
    assert list(play.supervisor.serving) == [0]
    play.sync.sync(5)  # the replacement is not there yet
    assert play.sent[-1] == (5, [0])
    play.supervisor.ready = [1]
    play.sync.sync(6)
    assert play.sent[-1] == (6, [0, 1])
    assert play.num_connections == 1  # the group was made anew
    assert sorted(play.supervisor.serving) == [0, 1]


def test_one_that_died_in_the_middle_is_not_tried_again() -> None:
    play = Play({1: "update_weights: ActorDiedError"}).start()
    play.dying = {1}
    play.sync.sync(4)
    assert play.sent == [(4, [0, 1])]
    assert play.supervisor.replaced == [(1, "died")]


def test_a_replacement_gets_the_current_weights_before_it_serves() -> None:
    play = Play(num_engines=1).start()
    play.sync.sync(3)
    play.supervisor.replace(0, "died")
    play.sync.give_weights_to_newcomers()
    assert play.sent == [(3, [0])]  # nobody is there yet
    play.supervisor.ready = [0]
    play.sync.give_weights_to_newcomers()
    assert play.sent[-1] == (3, [0])
    assert list(play.supervisor.serving) == [0]


def test_an_engine_that_dropped_its_weights_in_sleep_gets_them_again() -> None:
    play = Play().start()
    play.sync.sync(3)
    play.supervisor.needs_weights = True
    play.sync.give_weights_to_newcomers()
    assert play.sent[-1] == (3, [0, 1])
    play.sync.give_weights_to_newcomers()
    assert len(play.sent) == 2


def test_without_restarts_left_the_run_ends_with_the_cause() -> None:
    play = Play(*[{0: "deaf"}] * 4).start()
    play.supervisor.restarts_left = 0
    with pytest.raises(ComponentDied, match="did not take version 2: deaf"):
        play.sync.sync(2)


def test_metrics_are_of_the_syncs_since_the_last_call() -> None:
    play = Play().start()
    play.sync.sync(1)
    metrics = play.sync.take_metrics()
    assert metrics["time/weight_sync_max"] == metrics["time/weight_sync_median"] == 0.25
    assert metrics["time/weight_sync"] >= 0
    assert play.sync.take_metrics() == {}
