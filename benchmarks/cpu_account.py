"""How much CPU each process of a run used for some of its steps."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import ray

from open_instruct.run.fully_async_trainer import FullyAsyncTrainer, StepUnderWay


def accounting_trainer(first: int, num_steps: int, report: Path) -> type[FullyAsyncTrainer]:
    """A trainer that writes `{"wall_s", "steps", "cpu_s": {process: seconds}}` of steps `first` to `first + num_steps - 1`.

    Others have to follow: rollouts run ahead, so the last steps of a run cost less than they use.
    """

    class AccountingTrainer(FullyAsyncTrainer):
        _before: dict[str, float]
        _started: float

        def begin_step(self, training_step: int, hooks: Any) -> StepUnderWay:
            if training_step == first:
                self._started, self._before = time.perf_counter(), cpu_seconds(self._components)
            if training_step == first + num_steps:
                wall_s, after = time.perf_counter() - self._started, cpu_seconds(self._components)
                used = {name: seconds - self._before.get(name, 0.0) for name, seconds in after.items()}
                report.write_text(json.dumps({"wall_s": wall_s, "steps": num_steps, "cpu_s": used}))
            return super().begin_step(training_step, hooks)

    return AccountingTrainer


def cpu_seconds(parts: Any) -> dict[str, float]:
    """CPU seconds of each kind of process so far. `ray` is what serves all of them: its GCS, raylet and agents."""
    controller = pid_of(parts.rollouts.controller)
    actors = {
        "controller": [controller],
        "prompt_queue": [pid_of(parts.rollouts.queues[0].actor)],
        "results_queue": [pid_of(parts.rollouts.queues[1].actor)],
        "message_queue": [pid_of(parts.message_queue.actor)],
        "engines": sorted({pid_of(engine) for engine in set(parts.rollouts.rollout_engines)}),
        "learner": [pid_of(worker) for worker in parts.learners.workers],
    }
    used = {name: sum(_seconds(psutil.Process(pid)) for pid in pids) for name, pids in actors.items()}
    used["verifiers"] = sum(map(_seconds, psutil.Process(controller).children(recursive=True)))
    used["driver"] = _seconds(psutil.Process())
    others = [one for one in psutil.Process().children() if one.name() in ("gcs_server", "raylet")]
    used["ray"] = sum(map(_seconds, others))
    return used


def cpu_seconds_of(actors: Iterable[Any]) -> float:
    return sum(_seconds(psutil.Process(pid_of(actor))) for actor in actors)


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()), timeout=60.0)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
