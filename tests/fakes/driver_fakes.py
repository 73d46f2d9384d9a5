"""A whole run of the driver with everybody else played: learners that count steps, a controller that counts prompts.

What the driver itself does is real: the step loop, the trainer, the synchronizer, checkpoints, metrics and fates of prompts.
"""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct.cluster.failures import ComponentDied
from open_instruct.data_types import RolloutBatch
from open_instruct.engines.weight_update_client import UpdateReport
from open_instruct.grpo_fast import run_to_its_end
from open_instruct.learners.step_sums import NONFINITE_STEPS
from open_instruct.report import run_log
from open_instruct.report.run_log import RunLog
from open_instruct.rollouts.batch_progress import BatchProgress, Returned, RolloutNews
from open_instruct.run import fully_async_trainer
from open_instruct.run.device_sharing import DeviceSharing
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.run.parameter_synchronizer import ParameterSynchronizer
from open_instruct.run.run_saving import checkpoint_store
from open_instruct.run.weight_agreement import MismatchWatch
from open_instruct.run.wiring import Run
from open_instruct.system.signals import Signals
from open_instruct.system.timer import Timer

NUM_STEPS = 6
PROMPTS_PER_STEP = 4


@pytest.fixture(autouse=True)
def played_around(monkeypatch: pytest.MonkeyPatch, restored_logging: None) -> None:
    """What around the driver is played in every test."""
    del restored_logging
    monkeypatch.setattr(fully_async_trainer, "merge_step_metrics", lambda reports: {NONFINITE_STEPS: 0})
    monkeypatch.setattr(run_log, "plot_reward_curve", lambda *_: None)


class PowerLoss(BaseException):
    """The driver's process is gone from one moment to the next."""


class FakeSupervisor:
    """Engines are names; a replacement has another one."""

    def __init__(self, engines: list[str]) -> None:
        self.engines = engines
        self.serving: dict[int, str] = {}
        self.ready: dict[int, str] = {}
        self.replaced: list[tuple[int, str]] = []
        self.num_restarts = 0
        self.has_begun = False
        self.needs_weights: set[int] = set()
        self.needs_weights_to_evaluate: set[int] = set()
        self.restarts_left = 10

    def serve(self, numbers: list[int]) -> None:
        self.has_begun |= bool(numbers)
        self.serving |= {number: self.engines[number] for number in numbers}

    def admit_replacement(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.ready[number]
        self.serve(numbers)

    def replace(self, number: int, cause: str) -> None:
        if self.restarts_left == 0:
            raise ComponentDied(cause)
        self.restarts_left -= 1
        self.num_restarts += 1
        self.has_begun = True
        self.replaced.append((number, cause))
        self.serving.pop(number, None)
        self.ready.pop(number, None)
        self.engines[number] += " again"

    def load(self, number: int) -> None:
        self.ready[number] = self.engines[number]


class Remote:
    """An actor whose methods run at once: what `.remote` returns is the answer itself. Calls are noted."""

    def __init__(self, played: Any) -> None:
        self._played = played
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append((method, *args))
            return getattr(self._played, method)(*args)

        return SimpleNamespace(remote=remote)


def batch_progress(**known: Any) -> BatchProgress:
    """The progress of step 1, of which nothing has come back unless `known` says otherwise."""
    nothing: dict[str, Any] = {
        "training_step": 1,
        "num_prompts": 8,
        "num_back": 0,
        "num_usable": 0,
        "num_masked": 0,
        "returned": Returned(),
        "version": 0,
        "num_waited_for": len(known.get("first_waited_for", ())),
        "first_waited_for": [],
        "num_being_scored": 0,
        "of_teacher": "",
        "num_waiting": 0,
    }
    return BatchProgress(**(nothing | known))


class PlayedController:
    """Step n consists of the prompts 4n - 4 to 4n - 1."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.evaluated: list[int] = []
        """Versions whose evaluation was collected."""
        self.evaluating: int | None = None
        self.sets: Sequence[str] = ()
        """The evaluation sets of the last evaluation."""
        self.num_sets = 1
        self.evaluation_is_complete = False

    def load(self, training_step: int, path: str) -> None:
        self.committed = json.loads(Path(path).read_text())
        assert self.committed == list(range(1, training_step + 1))

    def save(self, training_step: int, path: str) -> None:
        assert self.committed == list(range(1, training_step + 1))
        Path(path).write_text(json.dumps(self.committed))

    def start(self, version: int) -> None:
        assert version == len(self.committed)

    def commit(self, training_step: int, tokens: Sequence[Any] = ()) -> list[dict[str, object]]:
        self.committed.append(training_step)
        numbers = range(PROMPTS_PER_STEP * (training_step - 1), PROMPTS_PER_STEP * training_step)
        return [{"prompt_id": f"train-{number}", "row": number, "fate": "consumed"} for number in numbers]

    def set_version(self, version: int) -> None:
        pass

    def start_evaluation(self, version: int, sets: Sequence[str]) -> None:
        assert self.evaluating is None
        self.evaluating, self.sets = version, sets

    def take_evaluation(self) -> dict[str, float]:
        assert self.evaluating is not None
        self.evaluated.append(self.evaluating)
        version, self.evaluating = self.evaluating, None
        by_set = {f"eval/{name}/pass_at_1": version / 100 for name in self.sets if self.num_sets > 1}
        return by_set | ({"eval/pass_at_1": version / 100} if len(self.sets) == self.num_sets else {})

    def give_up_evaluation(self) -> None:
        self.evaluating = None

    def news(self) -> RolloutNews:
        return RolloutNews([], self.evaluation_is_complete, {}, batch_progress())

    def status(self) -> dict[str, Any]:
        samples = 4 * PROMPTS_PER_STEP * len(self.committed)
        return {
            "prompts": {"dropped": {}},
            "queues": {"prompts": 0, "results": 0},
            "warnings": [],
            "highest_reward": None,
            "statistics": {"total_generated_samples": samples, "dropped_stale_samples": 0},
        }

    def close_ledger(self) -> dict[str, Any]:
        consumed = PROMPTS_PER_STEP * len(self.committed)
        return {"issued": consumed, "consumed": consumed, "dropped": {}, "reissued": 0, "left_out": {}}


class PlayedLearners:
    """Two of them. Their weights are a number: the training steps that are in them."""

    def __init__(self) -> None:
        self.version = 0
        self.sync_failures: list[dict[int, str]] = []
        """What becomes of the next attempts to send weights."""

    def async_load_checkpoint(self, directory: str, version: int) -> list[Any]:
        self.version = int(Path(directory, "weights").read_text())
        assert self.version == version
        return [None, None]

    def async_save_checkpoint(self, directory: str) -> list[Any]:
        Path(directory, "weights").write_text(str(self.version))
        return [{"weights": len(str(self.version))}, {}]

    def async_save_model(self, step_id: int, *, directory: str, with_optimizer: bool) -> list[Any]:
        assert step_id == self.version
        Path(directory, "model.safetensors").write_text(str(self.version))
        return [None, None]

    def async_train(self, rollout_id: int, partial_batch: RolloutBatch) -> list[Any]:
        assert rollout_id == self.version == partial_batch.training_step - 1
        self.version += partial_batch.is_last
        return [{}, {}]

    def async_held_version(self) -> list[Any]:
        return [self.version, self.version]

    def async_init_weight_update_connections(self, _manager: object, engines: dict[int, str]) -> list[Any]:
        return [{}]

    def async_update_weights(self, version: int, engines: list[int]) -> list[Any]:
        assert version == self.version
        failures = self.sync_failures.pop(0) if self.sync_failures else {}
        confirmed = {number: version for number in engines if number not in failures}
        return [UpdateReport(confirmed, failures, dict.fromkeys(confirmed, 0.1)), None]


class PlayedMessages:
    """Always has the next partial batch of the next step."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self.next_partial_batch = (1, 0)
        self.actor = Remote(SimpleNamespace(set_version=lambda version: None))

    def get_ref(self, *, timeout: float, max_batch_count: int) -> list[Any]:
        step, number = self.next_partial_batch
        is_last = number == self._num_batches - 1
        self.next_partial_batch = (step + 1, 0) if is_last else (step, number + 1)
        metrics = {
            "val/num_step_tokens": 120,
            "val/num_step_response_tokens": 100,
            "avg_sample_age": 0.0,
            "max_sample_age": 0,
            "scores": 0.5,
            "all_groups/scores": 0.5,
            "num_steps_off_policy": 0.0,
            "num_steps_off_policy_max": 0,
        }
        return [SimpleNamespace(payload=RolloutBatch(step, [], metrics=metrics, number=number, is_last=is_last))]

    def get_statistics_ref(self) -> dict[str, int]:
        return {"queue_size": 0}


class PlayedComponents:
    """Waits for nothing, notices signals where the real `Components` do.

    Args:
        during: what is waited for (or a part of its name) when something happens.
        at_time: on which of these waits, from 1.
        power_fails: the process is gone then; else SIGTERM comes.
    """

    def __init__(self, *, during: str, at_time: int, power_fails: bool) -> None:
        self._during, self._times_left, self._power_fails = during, at_time, power_fails
        self.signals = Signals()
        self.sharing = DeviceSharing()
        self.supervisor = FakeSupervisor(["engine 0", "engine 1"])
        self.activity = SimpleNamespace(metrics=lambda serving: {})
        self.controller = PlayedController()
        self.learners = PlayedLearners()
        self.rollouts = SimpleNamespace(
            controller=Remote(self.controller), rollout_engines=self.supervisor.engines, async_eval=lambda version: None
        )
        self.health = SimpleNamespace(is_ending=False, check=lambda: None, watch=lambda: None)
        self.waits: list[str] = []
        self.limits: dict[str, str] = {}
        """By what was waited for, the option that a message names when it takes too long."""
        self.engines_die_during = ""
        """What is waited for when all engines die. Their replacements are there at once."""
        self.engine_is_dead_during = ""
        """What is waited for when an engine dies for which no restart is left."""
        self.prompts_come_to_a_sleeper_during = ""
        """What is waited for when engine 1, which has discarded its weights, gets prompts of an evaluation."""

    def wait(
        self,
        refs: Any,
        *,
        subject: str,
        timeout_s: float,
        limit: str = "",
        interruptible: bool = False,
        on_poll: Callable[[], None] = lambda: None,
        **_: Any,
    ) -> Any:
        assert timeout_s > 0
        self.limits[subject] = limit
        self.waits.append(subject)
        if self._during and self._during in subject:
            self._times_left -= 1
            if self._times_left == 0:
                self._happens()
        if interruptible:
            self.signals.raise_if_received()
        if subject == self.engines_die_during:
            for number in range(len(self.supervisor.engines)):
                self.supervisor.replace(number, "died")
                self.supervisor.load(number)
        if subject == self.engine_is_dead_during and not self.health.is_ending:
            raise ComponentDied("engine 0 died")
        if subject == self.prompts_come_to_a_sleeper_during:
            self.supervisor.needs_weights.add(1)
            self.supervisor.needs_weights_to_evaluate.add(1)
        on_poll()
        return refs

    def _happens(self) -> None:
        if self._power_fails:
            raise PowerLoss
        self.signals.received = signal.SIGTERM


def played_run(
    output_dir: Path,
    *,
    during: str = "",
    at_time: int = 1,
    power_fails: bool = False,
    num_batches: int = 1,
    **options: Any,
) -> Any:
    """A run, or the rest of one, that stands before its start; `during` says when SIGTERM comes, or the power fails."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "total_episodes": 16 * NUM_STEPS,
        "dataset_mixer_eval_list": ["held_out.jsonl", "1.0"],
        "local_eval_every": 2,
        "checkpoint_state_freq": -1,
        "save_freq": -1,
        "sync_retry_delay": 0.0,
        **options,
    }
    args = make_args(**settings)
    components: Any = PlayedComponents(during=during, at_time=at_time, power_fails=power_fails)
    components.controller.num_sets = len(args.evaluation_sets)
    messages: Any = PlayedMessages(num_batches)
    timer = Timer()
    return Run(
        args=args,
        components=components,
        log=RunLog(args),
        store=checkpoint_store(args),
        evaluation_sets=args.evaluation_sets,
        trainer=FullyAsyncTrainer(args, components, messages, timer),
        synchronizer=ParameterSynchronizer(args, components),
        message_queue=messages,
        timer=timer,
        identity={"train": None},
        mismatch_watch=MismatchWatch(args),
    )


def go(run: Any) -> int:
    """The exit code."""
    run.message_queue.next_partial_batch = (1, 0)
    newest = run.store.newest()
    if newest is not None:
        run.message_queue.next_partial_batch = (newest.state["progress"]["training_step"] + 1, 0)
    try:
        return run_to_its_end(run)
    finally:
        run.log.close()
