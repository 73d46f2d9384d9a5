"""Rollouts whose lengths have a heavy tail, and processes on cores of their own: roles for `async_gain.py`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from open_instruct.data_types import PromptRequest
from open_instruct.rollouts.controller import Rollouter
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer

SIGMA = 1.0
MEAN_SHARE = 1 / 8
"""Mean length of a response, as a share of `--response_length`."""


class HeavyTailRollouter(Rollouter):
    """Each group gets a length drawn by its prompt's number: log-normal, cut off at `--response_length`."""

    def _custom_generation_logic(self, batch: list[PromptRequest]) -> list[PromptRequest]:
        return [self._with_length(request) for request in batch]

    def _with_length(self, request: PromptRequest) -> PromptRequest:
        longest = self._args.response_length
        rng = np.random.default_rng([self._args.seed, int(request.prompt_id.rpartition("-")[2])])
        mu = np.log(longest * MEAN_SHARE) - SIGMA**2 / 2
        length = int(np.clip(rng.lognormal(mu, SIGMA), 2, longest))
        return replace(
            request, generation_config=replace(request.generation_config, max_tokens=length, ignore_eos=True)
        )


class PinnedTrainer(FullyAsyncTrainer):
    """Gives the engine one core and the learner another."""

    def __init__(self, args: Any, parts: Any, message_queue: Any, timer: Any) -> None:
        super().__init__(args, parts, message_queue, timer)
        cores = sorted(os.sched_getaffinity(0))
        [engine], [learner] = parts.rollouts.rollout_engines, parts.learners.workers
        for actor, core in ((engine, cores[0]), (learner, cores[1 % len(cores)])):
            for thread in Path(f"/proc/{ray.get(actor.pid.remote(), timeout=60)}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
