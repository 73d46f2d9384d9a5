"""Engines that die, hang or do not come up again. Most are played by plain Ray actors; the last test has a real one."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from component_fakes import components_of
from conftest import MAX_MODEL_LEN, TIMEOUT_S, make_args

from open_instruct.cluster import bundles
from open_instruct.cluster.failures import ComponentDied
from open_instruct.cluster.node_watch import LostNode
from open_instruct.data_types import PromptRequest, SamplingConfig
from open_instruct.engines.weight_update_client import HELD_UP, UpdateAbandoned, WeightUpdateClient
from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender
from open_instruct.run import engine_supervisor, rollout_manager
from open_instruct.run.components import Components
from open_instruct.run.device_sharing import ExclusiveSharing, FreeDevices
from open_instruct.run.engine_supervisor import EngineSupervisor
from open_instruct.run.heartbeats import Heartbeats
from open_instruct.run.parameter_synchronizer import ParameterSynchronizer
from open_instruct.system.interruption import Interrupted

pytestmark = [pytest.mark.extended, pytest.mark.alone]


@pytest.fixture(autouse=True)
def played_parts_travel_as_code(ray_session: Any) -> None:
    """Actors cannot import test modules."""
    ray_session.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class PlayedEngine:
    """Answers like an engine; `hangs_on`, `fails_on` and `waits_on` (until it is let go) name calls that do not go well."""

    def __init__(self, number: int, hangs_on: str = "", fails_on: str = "", waits_on: str = "") -> None:
        self._number = number
        self._is_let_go = False
        self._troubles = {hangs_on: time.sleep, fails_on: self._fail, waits_on: self._wait}
        self._inventory = {"held": [f"train-{number}"], "idle_s": 0.0, "needs_weights": False, "state": "serving"}
        self._calls: list[str] = []

    def _fail(self, _: float) -> None:
        raise RuntimeError(f"engine {self._number} was told to fail")

    def _wait(self, limit_s: float) -> None:
        ends_at = time.monotonic() + limit_s
        while not self._is_let_go and time.monotonic() < ends_at:
            time.sleep(0.01)
        self._fail(0.0)

    def abort_weight_update(self) -> None:
        self._is_let_go = True

    def _called(self, name: str) -> None:
        self._calls.append(name)
        if name in self._troubles:
            self._troubles[name](1000.0)

    def calls(self) -> list[str]:
        return self._calls

    def pid(self) -> int:
        return os.getpid()

    def ready(self) -> int:
        self._called("ready")
        return self._number

    def process_queue_continuously(self) -> None:
        self._called("process_queue_continuously")
        time.sleep(1000.0)

    def take_inventory(self) -> dict[str, Any]:
        return self._inventory

    def set_inventory(self, **changes: Any) -> None:
        self._inventory |= changes

    def start_weight_update(self, update_id: int) -> None:
        self._called("start")

    def update_weights(self, update_info: dict[str, Any], update_id: int) -> None:
        self._called("update")

    def finish_weight_update(self, version: int, update_id: int) -> dict[str, float]:
        self._called("finish")
        return {"version": version, "pause_s": 0.1}

    def release_memory_occupation(self) -> int:
        self._called("release")
        return 10


class PlayedController:
    def __init__(self) -> None:
        self._events: list[Any] = []

    def take_back_prompts(self) -> int:
        self._events.append("take back")
        return 0

    def recover_lost(self, held: list[str]) -> int:
        self._events.append(held)
        return 3

    def events(self) -> list[Any]:
        return self._events

    def stop(self) -> None:
        pass


class Stage:
    """Played engines under a real supervisor. `roles`: what the next engines that are started do, by `PlayedEngine`'s options."""

    def __init__(self, ray: Any, *roles: dict[str, str], num_engines: int = 2, **options: Any) -> None:
        self.ray = ray
        self.roles = list(roles)
        self.controller = ray.remote(PlayedController).options(num_cpus=0).remote()
        self.lost_nodes: set[int] = set()
        """Engines whose node is gone."""
        self.may_start = True
        self.engines = [self.start_engine(number) for number in range(num_engines)]
        self.supervisor = EngineSupervisor(
            make_args(**options),
            self.engines,
            self.controller,
            self.start_engine,
            lost_node=lambda number: LostNode("10.0.0.2", "ab", [], [number]) if number in self.lost_nodes else None,
            may_start=lambda: self.may_start,
        )
        self.ask([engine.pid.remote() for engine in self.engines])

    def start_engine(self, number: int) -> Any:
        """No node but the lost one has room."""
        if number in self.lost_nodes:
            return None
        role = self.roles.pop(0) if self.roles else {}
        return self.ray.remote(PlayedEngine).options(num_cpus=0, max_concurrency=8).remote(number, **role)

    def ask(self, refs: Any) -> Any:
        return self.ray.get(refs, timeout=TIMEOUT_S)

    def pid(self, number: int) -> int:
        return self.ask(self.engines[number].pid.remote())

    def check_until(self, is_so: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline
            self.supervisor.check()
            time.sleep(0.05)


@pytest.fixture
def stage(ray_session: Any) -> Iterator[Callable[..., Stage]]:
    list(weights())  # imports transformers, which takes longer than the limits here
    stages: list[Stage] = []

    def make(*roles: dict[str, str], **options: Any) -> Stage:
        stages.append(Stage(ray_session, *roles, **options))
        return stages[-1]

    yield make
    for one in stages:
        for actor in (*one.engines, one.controller):
            ray_session.kill(actor)


def test_a_dead_engine_is_replaced_its_prompts_first(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.supervisor.serve([0, 1])
    play.check_until(lambda: True)
    assert play.supervisor.num_restarts == 0
    os.kill(play.pid(0), signal.SIGKILL)
    play.check_until(lambda: play.supervisor.num_restarts == 1)
    assert play.ask(play.controller.events.remote()) == ["take back", ["train-1"]]
    assert play.supervisor.num_recovered_prompts == 3
    assert list(play.supervisor.serving) == [1]

    play.check_until(lambda: play.supervisor.ready)
    play.supervisor.serve([0])  # it has no weights yet
    assert list(play.supervisor.serving) == [1]
    play.supervisor.admit_replacement([0])
    assert sorted(play.supervisor.serving) == [0, 1]
    assert not play.supervisor.ready
    play.supervisor.check()
    assert play.supervisor.num_restarts == 1


def test_a_lost_node_costs_its_engines_and_no_restart(
    stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    play = stage(num_engines=3, max_engine_restarts=1)
    play.supervisor.serve([0, 1, 2])
    play.lost_nodes |= {0, 1}
    for number in (0, 1):
        os.kill(play.pid(number), signal.SIGKILL)
    play.check_until(lambda: list(play.supervisor.serving) == [2])
    assert "Going on with 1 engine" in caplog.text
    assert "node 10.0.0.2 (ab) was lost, and with it engine 1" in caplog.text
    assert play.supervisor.num_restarts == 0
    assert play.supervisor.num_recovered_prompts == 6
    play.lost_nodes.add(2)
    os.kill(play.pid(2), signal.SIGKILL)
    with pytest.raises(
        ComponentDied, match=r"engine 2 died: .* no node has room for another engine, and no engine is left"
    ):
        play.check_until(lambda: False)


def test_an_engine_moves_only_when_ray_knows_that_its_node_is_gone(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = {"ab"}
    monkeypatch.setattr(bundles, "is_alive", lambda node_id: node_id in alive)
    play = stage(num_engines=2, max_engine_restarts=0)
    play.supervisor.serve([0, 1])
    play.lost_nodes.add(0)
    old = play.engines[0]
    os.kill(play.pid(0), signal.SIGKILL)
    play.check_until(lambda: list(play.supervisor.serving) == [1])
    assert play.supervisor.num_recovered_prompts == 3  # at once
    play.lost_nodes.clear()  # there is room on another node
    play.supervisor.serve([0, 1])  # it has no place yet
    play.supervisor.check()
    assert play.engines[0] is old
    assert list(play.supervisor.serving) == [1]
    alive.clear()
    play.check_until(lambda: play.supervisor.ready)
    assert play.engines[0] is not old
    play.supervisor.admit_replacement([0])
    assert sorted(play.supervisor.serving) == [0, 1]
    assert play.supervisor.num_restarts == 0


def test_an_engine_is_not_started_while_learners_have_its_device(stage: Callable[..., Stage]) -> None:
    play = stage()
    play.supervisor.serve([0, 1])
    play.may_start = False
    old = play.engines[0]
    os.kill(play.pid(0), signal.SIGKILL)
    play.check_until(lambda: play.supervisor.num_restarts == 1)
    play.supervisor.check()
    assert play.supervisor.num_recovered_prompts == 3  # at once
    assert play.engines[0] is old
    play.may_start = True
    play.check_until(lambda: play.supervisor.ready)
    assert play.engines[0] is not old


def test_a_stopped_engine_is_killed_and_replaced(stage: Callable[..., Stage]) -> None:
    play = stage(engine_stall_timeout_s=1.5)
    play.supervisor.serve([0, 1])
    pid = play.pid(0)
    os.kill(pid, signal.SIGSTOP)
    play.check_until(lambda: play.supervisor.num_restarts == 1)
    play.check_until(lambda: play.supervisor.ready)
    play.check_until(lambda: not os.path.exists(f"/proc/{pid}"))  # it could have gone on later
    assert list(play.supervisor.serving) == [1]


def test_an_engine_with_work_that_takes_no_step_is_replaced(
    stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    play = stage(engine_stall_timeout_s=1.0)
    play.supervisor.serve([0, 1])
    play.ask(play.engines[1].set_inventory.remote(held=[], idle_s=100.0))  # nothing to do
    play.ask(play.engines[0].set_inventory.remote(idle_s=7.0))
    play.check_until(lambda: play.supervisor.num_restarts == 1)
    assert "engine 0 holds 1 prompts and took no step for 7 s; starting it again (1 of 3)" in caplog.text
    assert list(play.supervisor.serving) == [1]


def test_an_engine_in_a_long_update_does_not_count_as_stalled(stage: Callable[..., Stage]) -> None:
    """The update has a deadline of its own; and when it ends, the time without a step begins anew."""
    play = stage(engine_stall_timeout_s=1.0)
    play.supervisor.serve([0, 1])
    play.ask([engine.set_inventory.remote(state="updating", idle_s=7.0) for engine in play.engines])
    for _ in range(30):
        play.supervisor.check()
        time.sleep(0.05)
    assert play.supervisor.num_restarts == 0
    play.ask(play.engines[0].set_inventory.remote(state="serving"))
    play.check_until(lambda: play.supervisor.num_restarts == 1)
    assert list(play.supervisor.serving) == [1]


def test_after_an_update_an_engine_has_the_whole_limit_for_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(engine_supervisor.time, "monotonic", lambda: clock.now)
    supervisor = EngineSupervisor(make_args(engine_stall_timeout_s=300.0), [], None, lambda _: None)  # type: ignore[arg-type]
    inventory = {"held": ["train-1"], "needs_weights": False}
    assert supervisor._stall_cause(0, {**inventory, "state": "updating", "idle_s": 500.0}) == ""
    clock.now += 299.0
    assert supervisor._stall_cause(0, {**inventory, "state": "serving", "idle_s": 799.0}) == ""
    clock.now += 2.0
    assert "took no step for 301 s" in supervisor._stall_cause(0, {**inventory, "state": "serving", "idle_s": 801.0})


def test_an_engine_that_sleeps_without_weights_says_whether_an_evaluation_waits_for_it() -> None:
    supervisor = EngineSupervisor(make_args(), [], None, lambda _: None)  # type: ignore[arg-type]
    inventory = {"needs_weights": True, "state": "asleep", "idle_s": 0.0}
    assert supervisor._stall_cause(0, {**inventory, "held": ["train-1"]}) == ""
    assert supervisor._stall_cause(1, {**inventory, "held": ["train-2", "eval-4-0"]}) == ""
    updating = {"needs_weights": True, "state": "updating", "idle_s": 0.0}  # it is about to get them
    assert supervisor._stall_cause(2, {**updating, "held": ["eval-4-1"]}) == ""
    assert supervisor.needs_weights == {0, 1}
    assert supervisor.needs_weights_to_evaluate == {1}


def test_a_replacement_that_does_not_come_up_is_replaced_until_no_restart_is_left(stage: Callable[..., Stage]) -> None:
    play = stage({}, {}, {"fails_on": "ready"}, {"hangs_on": "ready"}, init_timeout_s=2.0, max_engine_restarts=2)
    play.supervisor.serve([0, 1])
    os.kill(play.pid(0), signal.SIGKILL)
    play.check_until(lambda: play.supervisor.num_restarts == 2)
    with pytest.raises(ComponentDied, match="engine 0 was not ready 2 s after it was started again"):
        play.check_until(lambda: False)
    assert play.ask(play.controller.events.remote()) == ["take back", ["train-1"]]  # the second had no prompts


def test_a_replacement_that_dies_before_it_serves_is_noticed(stage: Callable[..., Stage]) -> None:
    play = stage(engine_stall_timeout_s=2.0)
    play.supervisor.serve([0, 1])
    play.supervisor.replace(0, "was in the way")
    play.check_until(lambda: play.supervisor.ready)
    os.kill(play.pid(0), signal.SIGKILL)
    play.check_until(lambda: play.supervisor.num_restarts == 2)
    play.check_until(lambda: play.supervisor.ready)


def test_without_restarts_the_first_death_ends_the_run(stage: Callable[..., Stage]) -> None:
    play = stage(max_engine_restarts=0)
    play.supervisor.serve([0, 1])
    os.kill(play.pid(1), signal.SIGKILL)
    with pytest.raises(ComponentDied, match="engine 1 died"):
        play.check_until(lambda: False)


# --- one update, several engines --------------------------------------------------------------------------------------


def send(client: WeightUpdateClient, version: int) -> None:
    client.begin(version)
    RayObjectSender(client=client, source=weights(), is_sender=True).send_weights()


def weights() -> DeepSpeedWeightSource:
    return DeepSpeedWeightSource(torch.nn.Linear(2, 2), zero_stage=0)


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_an_engine_that_hangs_does_not_cost_the_others_the_update(stage: Callable[..., Stage], call: str) -> None:
    play = stage({"hangs_on": call}, num_engines=3)
    limit_s = 4.0
    client = WeightUpdateClient(play.engines, workers_per_engine=1, timeout_s=limit_s)
    started = time.monotonic()
    send(client, 4)
    assert time.monotonic() - started < 3 * limit_s  # and not once for each call of the update
    report = client.report()
    assert report.confirmed == {1: 4, 2: 4}
    assert report.failures.keys() == {0}
    assert "did not answer" in report.failures[0]
    assert play.ask(play.engines[0].calls.remote())[-1] == call  # and nothing after it


def test_engines_that_hang_one_after_another_cost_an_update_at_most_twice_its_limit(
    stage: Callable[..., Stage],
) -> None:
    play = stage({"hangs_on": "start"}, {"hangs_on": "update"}, {"hangs_on": "finish"}, num_engines=3)
    limit_s = 3.0
    client = WeightUpdateClient(play.engines, workers_per_engine=1, timeout_s=limit_s)
    started = time.monotonic()
    send(client, 4)
    assert time.monotonic() - started < 2.7 * limit_s
    assert client.report().failures.keys() == {0, 1, 2}


def test_where_all_receive_in_one_collective_nothing_is_sent_without_one_of_them(stage: Callable[..., Stage]) -> None:
    play = stage({"fails_on": "start"})
    client = WeightUpdateClient(play.engines, workers_per_engine=1, timeout_s=5.0, in_one_group=True)
    client.begin(4, engines=[1])
    with pytest.raises(UpdateAbandoned):
        client.start_weight_update()
    assert client.report().failures.keys() == {0, 1}
    assert play.ask(play.engines[1].calls.remote()) == ["start"]


def test_failure_in_a_collective_lets_those_go_who_wait_in_it(stage: Callable[..., Stage]) -> None:
    play = stage({"waits_on": "update"}, {"fails_on": "update"}, num_engines=3)
    client = WeightUpdateClient(play.engines, workers_per_engine=1, timeout_s=60.0, in_one_group=True)
    aborted: list[bool] = []
    client.abort_group = lambda: aborted.append(True)
    client.begin(4)
    assert client.start()
    started = time.monotonic()
    client.update_weights({})
    assert time.monotonic() - started < 20
    client.finish_weight_update()
    report = client.report()
    assert "was told to fail" in report.failures[1]
    assert [report.failures[number] for number in (0, 2)] == [HELD_UP, HELD_UP]
    assert report.confirmed == {}
    assert aborted == [True]


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def queues_and_components(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Real queues and a played rest, watched as in a run."""
    from ray.util.queue import Queue

    from open_instruct.rollouts.message_queue import MessageQueue

    monkeypatch.setattr(Heartbeats, "EVERY_S", 0.5)
    monkeypatch.setattr(Heartbeats, "LIMIT_S", 2.0)
    play = stage()
    prompts, results = (Queue(actor_options={"num_cpus": 0}) for _ in range(2))
    messages = MessageQueue.create(8)
    manager = SimpleNamespace(controller=play.controller, rollout_engines=play.engines)
    components = components_of(
        rollouts=manager, learners=SimpleNamespace(workers=[]), message_queue=messages, supervisor=play.supervisor
    )
    play.supervisor.serve([0, 1])
    components.health.heartbeats = Heartbeats.of_queues([prompts, results], messages)
    for queue in (prompts, results):
        queue.qsize()
    messages.qsize()
    yield SimpleNamespace(
        components=components,
        play=play,
        actors={
            "the prompt queue": prompts.actor,
            "the results queue": results.actor,
            "the message queue": messages.actor,
        },
    )
    for queue in (prompts, results):
        queue.shutdown(force=True)
    messages.shutdown()


def wait_for_nothing(components: Components, ray: Any) -> None:
    nothing = ray.remote(lambda: time.sleep(60)).options(num_cpus=0).remote()
    try:
        components.wait(nothing, subject="nothing", timeout_s=30.0)
    finally:
        ray.cancel(nothing, force=True)


@pytest.mark.parametrize("name", ["the prompt queue", "the results queue", "the message queue"])
def test_a_dead_queue_ends_the_run_by_name(queues_and_components: SimpleNamespace, ray_session: Any, name: str) -> None:
    ray_session.kill(queues_and_components.actors[name])
    started = time.monotonic()
    with pytest.raises(ComponentDied, match=f"{name} failed: ActorDiedError"):
        wait_for_nothing(queues_and_components.components, ray_session)
    assert time.monotonic() - started < 10


def test_an_engine_that_dies_while_devices_are_handed_over_is_replaced(queues_and_components: SimpleNamespace) -> None:
    components, play = queues_and_components.components, queues_and_components.play
    pid = play.pid(1)

    def offload(*, keep_weights: bool) -> list[Any]:
        os.kill(pid, signal.SIGKILL)
        return [engine.release_memory_occupation.remote() for engine in play.engines]

    manager: Any = SimpleNamespace(async_offload=offload)
    group: Any = SimpleNamespace()
    devices = FreeDevices(for_engines=False)
    turns = ExclusiveSharing(manager, group, components.wait, devices, timeout_s=TIMEOUT_S)
    turns.offload_engines()
    assert turns.take_metrics()["memory/engines_offloaded_bytes"] == 10  # of the other
    play.check_until(lambda: play.supervisor.num_restarts == 1)


def test_an_engine_that_cannot_give_its_memory_back_ends_the_run(
    queues_and_components: SimpleNamespace, ray_session: Any
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    failed = ray_session.remote(fail).options(num_cpus=0, max_retries=0).remote()
    with pytest.raises(ComponentDied, match="engines: offload failed: RuntimeError: out of memory"):
        queues_and_components.components.wait(
            [failed], subject="engines: offload", timeout_s=TIMEOUT_S, without_dead=True
        )


def test_a_dead_queue_is_named_even_when_its_users_die_first(
    queues_and_components: SimpleNamespace, ray_session: Any
) -> None:
    def fail() -> None:
        raise RuntimeError("a queue is gone")

    components = queues_and_components.components
    components.health.watches["the controller"] = ray_session.remote(fail).options(num_cpus=0).remote()
    ray_session.wait([components.health.watches["the controller"]], timeout=TIMEOUT_S)
    ray_session.kill(queues_and_components.actors["the prompt queue"])
    with pytest.raises(ComponentDied, match="the prompt queue failed: ActorDiedError"):
        wait_for_nothing(components, ray_session)


def test_a_queue_that_hangs_ends_the_run_by_name(queues_and_components: SimpleNamespace, ray_session: Any) -> None:
    actor = queues_and_components.actors["the message queue"]
    pid = ray_session.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ComponentDied, match="the message queue did not answer for 2 s"):
            wait_for_nothing(queues_and_components.components, ray_session)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_signal_is_told_once_while_something_is_finished_first(
    queues_and_components: SimpleNamespace, ray_session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    components = queues_and_components.components
    components.signals.received = signal.SIGTERM
    step = ray_session.remote(lambda: time.sleep(1.2)).options(num_cpus=0).remote()
    components.wait(step, subject="training step 3", timeout_s=TIMEOUT_S)
    assert caplog.text.count("SIGTERM came: training step 3 is finished first") == 1
    with pytest.raises(Interrupted):
        components.wait(step, subject="the batch of step 4", timeout_s=TIMEOUT_S, interruptible=True)


# --- a real engine ----------------------------------------------------------------------------------------------------


class LocalLearner:
    """Sends the weights of a model in this process, as the group of learners does."""

    def __init__(self, ray: Any, model: torch.nn.Module) -> None:
        self._ray = ray
        self.model = model
        self.version = 0

    def async_init_weight_update_connections(self, _manager: object, engines: dict[int, Any]) -> list[Any]:
        self._client = WeightUpdateClient(engines, workers_per_engine=1, timeout_s=60.0)
        return [self._ray.put({})]

    def shut_down(self) -> None:
        """Nothing runs anywhere else."""

    def async_held_version(self) -> list[Any]:
        return [self._ray.put(self.version)]

    def async_update_weights(self, version: int, engines: list[int]) -> list[Any]:
        self.version = version
        self._client.begin(version, engines)
        source = DeepSpeedWeightSource(self.model, zero_stage=0)
        RayObjectSender(client=self._client, source=source, is_sender=True).send_weights()
        return [self._ray.put(self._client.report())]


@pytest.fixture
def real(ray_session: Any, tied_model: str) -> Iterator[SimpleNamespace]:
    """A real engine with queues of its own, supervised, and a learner in this process."""
    from ray.util.queue import Queue
    from transformers import AutoModelForCausalLM

    from open_instruct.rollouts.message_queue import MessageQueue

    args = make_args(vllm_num_engines=1, sync_retry_delay=0.1)
    queues = [Queue(actor_options={"num_cpus": 0}) for _ in range(2)]
    controller = ray_session.remote(PlayedController).options(num_cpus=0).remote()

    def start_engine(number: int) -> Any:
        return rollout_manager.create_vllm_engine(args, tuple(queues), number, max_model_len=MAX_MODEL_LEN)

    engines = [start_engine(0)]
    supervisor = EngineSupervisor(args, engines, controller, start_engine)
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    learner: Any = LocalLearner(ray_session, model)
    message_queue = MessageQueue.create(8)

    def end(**_options: Any) -> None:
        for actor in (*engines, controller):
            ray_session.kill(actor)
        for queue in queues:
            queue.shutdown(force=True)
        message_queue.shutdown()

    manager: Any = SimpleNamespace(controller=controller, rollout_engines=engines, queues=queues, shut_down=end)
    components = components_of(rollouts=manager, learners=learner, message_queue=message_queue, supervisor=supervisor)
    synchronizer = ParameterSynchronizer(args, components)
    synchronizer.sync(0)
    supervisor.serve([0])
    yield SimpleNamespace(components=components, engines=engines, queues=queues, model=model, synchronizer=synchronizer)
    components.shut_down()


def wait_until_one_serves(real: SimpleNamespace) -> None:
    """As the step loop does while it waits for data."""
    deadline = time.monotonic() + TIMEOUT_S
    while not real.components.supervisor.serving:
        assert time.monotonic() < deadline
        real.components.health.check()
        real.synchronizer.give_weights_to_replacements()
        time.sleep(0.1)


def assert_it_samples_with(real: SimpleNamespace, prompt: np.ndarray, version: int) -> None:
    """The engine's log-probs are those of `real.model`, under the name `version`."""
    request = PromptRequest(prompt, SamplingConfig(max_tokens=24, seed=5), 1, "train-1", version)
    real.queues[0].put([request], timeout=TIMEOUT_S)
    [result] = real.queues[1].get(timeout=TIMEOUT_S)
    assert result.prompt_id == "train-1"
    assert {span[0] for spans in result.version_spans for span in spans} == {version}
    ids = torch.from_numpy(np.concatenate([prompt, result.responses[0]])).long()[None]
    with torch.no_grad():
        logprobs = real.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(result.logprobs[0], logprobs[len(prompt) - 1 :].numpy(), atol=1e-4)


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


def test_an_engine_killed_while_it_samples_serves_again_with_the_current_weights(
    ray_session: Any, real: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    supervisor = real.components.supervisor
    pid = ray_session.get(real.engines[0].pid.remote(), timeout=TIMEOUT_S)
    long = SamplingConfig(max_tokens=100, n=8, ignore_eos=True)
    real.queues[0].put([PromptRequest(prompts[0], long, 0, "train-0", 0)], timeout=TIMEOUT_S)
    while not ray_session.get(real.engines[0].take_inventory.remote(), timeout=TIMEOUT_S)["busy_s"]:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    while supervisor.num_restarts == 0:
        real.components.health.check()
    change(real.model)
    real.components.learners.version = 1
    real.synchronizer.sync(1)  # nobody is there to take it
    assert not supervisor.serving
    wait_until_one_serves(real)
    assert real.synchronizer.versions == {0: 1}
    assert_it_samples_with(real, prompts[1], version=1)


def test_an_engine_whose_swap_broke_off_is_replaced(
    real: SimpleNamespace, prompts: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter in the middle does not fit: those before it are loaded, those after it are not."""
    good = next(parameter for name, parameter in real.model.named_parameters() if "layers.1" in name)
    data = good.data
    good.data = torch.zeros(1, 2, 3)
    real.synchronizer.sync(1)
    assert "engine 0 did not take version 1: start_weight_update: RuntimeError: the weights are half old" in caplog.text
    assert not real.components.supervisor.serving
    good.data = data
    change(real.model)
    wait_until_one_serves(real)
    assert_it_samples_with(real, prompts[1], version=1)
