"""Retries, versions and replacements, with engines and learners that are played."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args
from driver_fakes import FakeSupervisor

from open_instruct.cluster.failures import DO_NOT_FIT, ComponentDied, WeightsDiffer
from open_instruct.engines.weight_update_client import HELD_UP, UpdateReport
from open_instruct.run.device_sharing import DeviceSharing
from open_instruct.run.parameter_synchronizer import ParameterSynchronizer
from open_instruct.system.signals import Signals


class Play:
    """Learners whose updates go as the test says: one dict of failures by engine for each attempt."""

    def __init__(self, *attempts: dict[int, str], num_engines: int = 2, **options: Any) -> None:
        engines = [f"engine {number}" for number in range(num_engines)]
        self.supervisor = FakeSupervisor(engines)
        self.attempts = list(attempts)
        self.sent: list[tuple[int, list[int]]] = []
        self.connected: list[dict[int, str]] = []
        self.unreachable: list[dict[int, str]] = []
        """Of the next attempts to connect, who is not reached, with the cause."""
        self.dying: set[int] = set()
        self.loading: set[int] = set()
        """Replacements that become ready while the next update is under way."""
        self.in_one_group = False
        """Whether each update goes to all that are connected, as in a collective."""
        self.rollouts = SimpleNamespace(rollout_engines=engines)
        self.sharing = DeviceSharing()
        self.signals = Signals()
        self.health = SimpleNamespace(check=self.replace_the_dead)
        self.held = 0
        """Version of the weights that the learners hold."""
        self.learners = SimpleNamespace(
            async_update_weights=self.update,
            async_init_weight_update_connections=self.connect,
            async_held_version=lambda: [self.held, self.held],
        )
        self.sync = ParameterSynchronizer(make_args(sync_retry_delay=0.0, **options), self)

    def start(self) -> "Play":
        self.supervisor.serve(list(range(len(self.supervisor.engines))))
        return self

    def sync_trained(self, version: int) -> None:
        """The learners have made step `version`, and their weights go to the engines."""
        self.held = version
        self.sync.sync(version)

    def connect(self, _manager: object, engines: dict[int, str]) -> list[Any]:
        self.connected.append(engines)
        return [self.unreachable.pop(0) if self.unreachable else {}]

    def update(self, version: int, engines: list[int]) -> list[UpdateReport]:
        if self.in_one_group:
            engines = list(self.connected[-1])
        self.sent.append((version, list(engines)))
        failures = {n: why for n, why in (self.attempts.pop(0) if self.attempts else {}).items() if n in engines}
        confirmed = {number: version for number in engines if number not in failures}
        return [UpdateReport(confirmed, failures, dict.fromkeys(confirmed, 0.25))]

    def wait(self, refs: Any, **_: Any) -> Any:
        self.replace_the_dead()
        return refs

    def replace_the_dead(self) -> None:
        for number in list(self.dying):
            self.supervisor.replace(number, "died")
            self.dying.discard(number)
        for number in list(self.loading):
            self.supervisor.load(number)
            self.loading.discard(number)


def test_the_first_sync_makes_the_group_and_reaches_everyone() -> None:
    play = Play()
    assert not play.sync.sync_group_initialized
    report = play.sync.sync(0)
    assert play.connected == [{0: "engine 0", 1: "engine 1"}]
    assert play.sent == [(0, [0, 1])]
    assert report.pauses_s == [0.25, 0.25]
    assert play.sync.sync_group_initialized
    assert play.sync.versions == {0: 0, 1: 0}


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
    play.supervisor.load(1)
    play.sync.sync(6)
    assert play.sent[-1] == (6, [0, 1])
    assert play.connected[-1] == {0: "engine 0", 1: "engine 1 again"}
    assert play.supervisor.serving == {0: "engine 0", 1: "engine 1 again"}


def test_one_that_died_in_the_middle_is_not_tried_again() -> None:
    play = Play({1: "update_weights: ActorDiedError"}).start()
    play.dying = {1}
    play.sync.sync(4)
    assert play.sent == [(4, [0, 1])]
    assert play.supervisor.replaced == [(1, "died")]


def test_a_replacement_gets_the_current_weights_before_it_serves() -> None:
    play = Play(num_engines=1).start()
    play.sync_trained(3)
    play.supervisor.replace(0, "died")
    play.sync.give_weights_to_replacements()
    assert play.sent == [(3, [0])]  # nobody is there yet
    play.supervisor.load(0)
    play.sync.give_weights_to_replacements()
    assert play.sent == [(3, [0]), (3, [0])]
    assert play.supervisor.serving == {0: "engine 0 again"}
    play.sync.give_weights_to_replacements()
    assert len(play.sent) == 2


def test_a_replacement_gets_what_the_learners_hold_and_the_others_are_left_alone() -> None:
    play = Play().start()
    play.sync_trained(3)
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    assert play.sync.give_weights_to_replacements() == 3
    assert play.sent[-1] == (3, [1])


def test_a_replacement_between_two_syncs_is_told_the_version_of_the_weights_that_it_gets() -> None:
    """With `trigger_parameter_sync_step` 3 the learners are two steps past what was last sent."""
    play = Play().start()
    play.sync_trained(3)
    play.held = 5
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    assert play.sync.give_weights_to_replacements() == 5
    assert play.sent[-1] == (5, [0, 1])  # all, because no two engines may serve different versions
    assert play.sync.current_param_version == 5
    assert play.sync.give_weights_to_replacements() is None


def test_where_all_sleep_for_a_replacement_all_get_weights_again() -> None:
    """With shared devices the others give way as well, and an engine that sleeps deeply has dropped its weights."""
    play = Play().start()
    play.sharing.is_exclusive = True
    play.sync_trained(3)
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    play.sync.give_weights_to_replacements()
    assert play.sent[-1] == (3, [0, 1])


def test_a_replacement_that_dies_before_it_serves_is_replaced_too() -> None:
    play = Play({}, *[{1: "update_weights: ActorDiedError"}] * 4).start()
    play.sync.sync(3)
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    play.sync.sync(4)
    assert play.supervisor.engines[1] == "engine 1 again again"
    assert list(play.supervisor.serving) == [0]
    play.supervisor.load(1)
    play.sync.sync(5)
    assert play.sync.versions == {0: 5, 1: 5}


def test_what_the_dead_confirmed_does_not_count_for_its_replacement() -> None:
    """It confirms, dies while another is tried again, and is ready before the sync ends."""
    play = Play({0: "slow"}, {0: "slow"}).start()
    play.dying, play.loading = {1}, {1}
    play.sync.sync(4)
    assert play.sent == [(4, [0, 1]), (4, [0, 1]), (4, [0])]
    assert play.supervisor.serving == {0: "engine 0", 1: "engine 1 again"}


def test_a_replacement_that_is_ready_when_all_is_sent_does_not_serve_yet() -> None:
    play = Play().start()
    play.sync_trained(3)
    play.supervisor.replace(1, "died")
    play.loading = {1}
    play.sync_trained(4)
    assert play.sent[-1] == (4, [0])
    assert list(play.supervisor.serving) == [0]
    play.sync.give_weights_to_replacements()
    assert play.sent[-1] == (4, [1])
    assert play.sync.versions == {0: 4, 1: 4}


def test_the_group_is_made_anew_after_a_loss_and_after_a_failure() -> None:
    play = Play({}, {1: "slow"}, num_engines=3).start()
    play.sync.sync(1)
    assert len(play.connected) == 1
    play.sync.sync(2)
    assert len(play.connected) == 2  # for the second attempt
    play.supervisor.replace(0, "died")
    assert not play.sync.sync_group_initialized
    play.sync.sync(3)
    assert play.connected[-1] == {1: "engine 1", 2: "engine 2"}
    play.sync.sync(4)
    assert len(play.connected) == 3


def test_when_all_engines_stay_behind_all_are_replaced_and_the_sync_returns() -> None:
    play = Play(*[{0: "deaf", 1: "deaf"}] * 2, max_sync_retries=1).start()
    play.sync_trained(4)
    assert [number for number, _ in play.supervisor.replaced] == [0, 1]
    play.sync_trained(5)  # there is nobody to send to
    assert len(play.sent) == 2
    play.supervisor.load(0)
    play.sync.give_weights_to_replacements()
    assert play.sync.versions == {0: 5}


def test_an_engine_that_dropped_its_weights_in_sleep_gets_them_again() -> None:
    play = Play().start()
    play.sync_trained(3)
    play.supervisor.needs_weights = {1}
    play.sync.give_weights_to_replacements()
    assert play.sent[-1] == (3, [1])
    play.sync.give_weights_to_replacements()
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
    assert metrics["time/engine_pause_max"] == metrics["time/engine_pause_median"] == 0.25
    assert metrics["time/weight_sync_max"] == metrics["time/weight_sync"]
    assert metrics["time/weight_sync"] >= 0
    assert play.sync.take_metrics() == {}


def test_an_engine_that_cannot_be_reached_costs_an_attempt_and_not_the_run() -> None:
    play = Play().start()
    play.unreachable = [{1: "init_weight_transfer_engine: ActorDiedError"}]
    play.sync_trained(1)
    assert play.sync.versions == {0: 1, 1: 1}
    assert [sorted(engines) for engines in play.connected] == [[0, 1], [0, 1]]
    assert play.sync.get_statistics()["sync_failures"] == 1


class PlayedAgreement:
    """Notes who is compared; refuses those whose name is given."""

    def __init__(self, refused: str = "") -> None:
        self.compared: list[list[str]] = []
        self._refused = refused

    def note_loaded(self, engines: dict[int, str]) -> None:
        self.loaded = list(engines.values())

    def check(self, engines: dict[int, str], *, send_again: Any) -> None:
        self.compared.append(list(engines.values()))
        if self._refused in engines.values():
            raise WeightsDiffer(self._refused)


def test_engines_are_compared_with_the_learners_before_they_serve() -> None:
    play = Play()
    play.sync._agreement = PlayedAgreement()  # type: ignore[assignment]
    play.sync.sync(0)
    assert play.sync._agreement.compared == [["engine 0", "engine 1"]]  # type: ignore[union-attr]
    assert play.sync._agreement.loaded == ["engine 0", "engine 1"]  # type: ignore[union-attr]
    play.start()
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    play.sync._agreement = PlayedAgreement(refused="engine 1 again")  # type: ignore[assignment]
    with pytest.raises(WeightsDiffer):
        play.sync.give_weights_to_replacements()
    assert list(play.supervisor.serving) == [0]


def test_weights_that_do_not_fit_end_the_run_at_once() -> None:
    play = Play({1: f"WeightsDoNotFit: {DO_NOT_FIT} MoE: no place for gate_up_proj"}).start()
    with pytest.raises(WeightsDiffer, match=r"engine 1.*gate_up_proj"):
        play.sync.sync(4)
    assert len(play.sent) == 1
    assert play.supervisor.replaced == []


def test_engines_held_up_by_another_are_sent_to_without_it() -> None:
    """It is replaced after all attempts; those that only waited for it in the collective are not."""
    play = Play(num_engines=3, max_sync_retries=1).start()
    play.unreachable = [{1: "did not answer ready"}] * 2
    play.sync_trained(1)
    assert [number for number, _ in play.supervisor.replaced] == [1]
    assert play.sync.versions == {0: 1, 2: 1}
    assert play.sent == [(1, [0, 2])]


def test_where_no_engine_serves_yet_those_held_up_are_replaced_too() -> None:
    play = Play(num_engines=2, max_sync_retries=0)
    play.unreachable = [{1: "did not answer ready"}]
    play.sync.sync(0)
    assert [number for number, _ in play.supervisor.replaced] == [1, 0]


def test_a_replacement_that_becomes_ready_in_the_last_attempt_is_not_replaced() -> None:
    """It was sent nothing yet, so it has failed at nothing."""
    play = Play({1: "deaf"}, num_engines=3, max_sync_retries=0).start()
    play.supervisor.replace(0, "died")
    play.loading = {0}
    play.sync_trained(4)
    assert play.supervisor.replaced == [(0, "died"), (1, "did not take version 4: deaf")]
    assert list(play.supervisor.serving) == [2]
    play.sync.give_weights_to_replacements()
    assert play.sync.versions == {0: 4, 2: 4}


def test_what_made_an_engine_fail_is_not_held_against_its_replacement() -> None:
    play = Play({0: "deaf", 1: "ActorDiedError"}, {0: "deaf"}, max_sync_retries=1).start()

    def check() -> None:  # engine 1 is found dead after the first attempt; its replacement is ready after the last
        if len(play.sent) == 1:
            play.supervisor.replace(1, "died")
        elif not play.supervisor.ready:
            play.supervisor.load(1)

    play.health.check = check
    play.sync_trained(4)
    assert play.supervisor.replaced == [(1, "died"), (0, "did not take version 4: deaf")]
    assert play.supervisor.ready == {1: "engine 1 again"}


def test_engines_in_a_collective_that_breaks_off_get_weights_again_although_they_had_them() -> None:
    """Otherwise they would generate nothing until the next update, because they have begun one that never ended."""
    play = Play(num_engines=3).start()
    play.in_one_group = True
    play.sync_trained(3)
    play.supervisor.replace(2, "died")
    play.supervisor.load(2)
    play.attempts = [{0: HELD_UP, 1: HELD_UP, 2: "update_weights: ActorDiedError"}]

    def check() -> None:
        if len(play.sent) == 2:
            play.supervisor.replace(2, "died")

    play.health.check = check
    play.sync.give_weights_to_replacements()
    assert play.sent[1:] == [(3, [0, 1, 2]), (3, [0, 1])]
    assert play.sync.versions == {0: 3, 1: 3}


def test_an_engine_that_has_the_version_and_cannot_be_reached_is_replaced_in_the_end() -> None:
    """It holds up the replacement of another engine. Otherwise attempts would never end."""
    play = Play(max_sync_retries=1).start()
    play.in_one_group = True
    play.sync_trained(3)
    play.supervisor.replace(1, "died")
    play.supervisor.load(1)
    play.unreachable = [{0: "did not answer ready"}] * 2
    play.sync.give_weights_to_replacements()
    assert play.supervisor.replaced == [(1, "died"), (0, "did not take version 3: did not answer ready")]
    assert play.sync.versions == {1: 3}
    assert list(play.supervisor.serving) == [1]
