"""Output directories of runs whose engines and learners are played: controller, workflow, verifiers and record are real.

`rc_run` is a run of the reasoning cache, and `FaultyRun` one in which everything fails that may fail.
"""

import logging
import os
import subprocess
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from controller_stage import MIXED, NUM_PROMPTS, SOLVED, MakePlay, Play, broken_off, ids
from group_fakes import ended_by
from played_policy import PlayedPolicy, RunnerStage

from open_instruct.data_types import GenerationResult, PromptRequest, SamplingConfig
from open_instruct.record.journal import Journal, WarningEvents
from open_instruct.record.places import RECORD
from open_instruct.report.component_log import component_logger
from open_instruct.report.metrics_file import MetricsWriter
from open_instruct.run.options_file import write_options
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.workflows.runner import Answer

ENGINE_DIED = "engine 1 died: its process is gone; starting it again (1 of 2)"
DISK_IS_FULL = "the record ends here and the run goes on without it: no space left on the device"
CONTROLLER_DIED = "the controller died: the process is gone"
TIMEOUT = "generation_timeout: over 600 s"
RC = {
    "rollout_workflow": "rc",
    "rc_train_on": "turns",
    "rc_summary_reward": "downstream_mean",
    "rc_num_reasoning_steps": 2,
    "rc_max_summary_tokens": 24,
    "rc_reasoning_prompt_template": "{problem}{curr_summary}",
    "rc_summarization_prompt_template": "{problem}{existing_summary}{reasoning}",
}


def ended_process() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


class PlayedRun:
    """One start of a run that writes what a driver writes."""

    def __init__(self, make_play: MakePlay, directory: Path, **options: Any) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.play: Play = make_play(record=True, output_dir=str(directory), **options)
        self.journal = Journal(directory / RECORD)
        self._metrics = MetricsWriter(directory / "metrics.jsonl")
        self._prompts = MetricsWriter(directory / "prompts.jsonl")
        write_options(self.play.args)

    def start(self, after_step: int = 0, *, process: int | None = None) -> None:
        self.journal.start(command=["grpo_fast.py"], title="played", process=process or os.getpid())
        self.journal.event("loop", after_step=after_step, checkpoint=f"step_{after_step}" if after_step else None)
        self.play.start(after_step)

    def train(self, step: int, **metrics: float) -> None:
        """The learners train the step that is ready."""
        batch = self.play.partial_batches(step)[-1]
        fates = self.play.finish_step(step)
        self.play.controller._record.flush()
        known = {name: value for name, value in batch.metrics.items() if isinstance(value, int | float)}
        self._metrics.write(step, {**known, "time/total": 2.0, "engine_restarts": 0, **metrics})
        self._prompts.write(step, {"prompts": fates})
        self.journal.event("step", step=step, seconds=2.0, waited_s=1.0, trained_s=0.9, sync_s=0.1)

    def close(self) -> None:
        self._metrics.close()
        self._prompts.close()


# --- the reasoning cache ----------------------------------------------------------------------------------------------


class TurnPolicy(PlayedPolicy):
    """Is asked by turns, which have no numbers of conversations."""

    def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
        return super().submit(f"turn/{len(self.prompts)}-0", prompt_ids, sampling)


def rc_run(make_play: MakePlay, directory: Path) -> Path:
    """A run of two steps: the summaries are trained too, and every second turn of reasoning is right."""
    run = PlayedRun(make_play, directory, **RC)
    run.start()
    play = run.play

    def say(text: str, number: int) -> str:
        return f"turn {number} <answer>{right if number % 2 else 'no'}</answer><end>"

    right = ""
    for step in (1, 2):
        for request in play.receive(NUM_PROMPTS):
            right = truth_of(play, request)
            stage = RunnerStage(play.args.workflow.make(), say, policy=TurnPolicy)
            stage.policy.version = play.version
            stage.runner.start(request)
            play.deliver(*stage.wait_for(1))
            stage.close()
        run.train(step)
    run.journal.end("done", 0)
    run.close()
    return directory


def truth_of(play: Play, request: PromptRequest) -> str:
    """The right answer to a prompt, as `Play.answer` knows it."""
    [text, *_] = play.answer(request, SOLVED).samples
    return play.tokenizer.decode(text.response_ids).partition("<answer>")[2].partition("</answer>")[0]


# --- faults -----------------------------------------------------------------------------------------------------------


class FaultyRun:
    """A run that is killed while it puts its third step together, and goes on after its checkpoint of step 2.

    Step 1: `retried` was given up and tried again, `lost` was lost with its engine, `unscored` came back because its verifier
    hung, of `partly` one response was not scored. Step 2: `old` was too old and came again, `cut` was cut off, `dropped` was
    given up for good.
    """

    retried, lost, unscored, partly = "train-0", "train-1", "train-2", "train-3"
    old, cut, dropped = "train-4", "train-5", "train-6"

    def __init__(self, make_play: MakePlay, directory: Path, patch: Any) -> None:
        self._make_play, self.directory, self._patch = make_play, directory, patch
        self._options = {"max_generation_attempts": 2, "mask_truncated_completions": True}

    def _begin(self) -> PlayedRun:
        return PlayedRun(self._make_play, self.directory, **self._options)

    def until_killed(self) -> None:
        """The first start."""
        run = self._begin()
        run.start(process=ended_process())
        with WarningEvents(run.journal):
            self._first_step(run)
            self._second_step(run)
            run.play.controller.save(2, str(self.directory / "state.npz"))
            run.journal.event("checkpoint", step=2, began=0.0, seconds=0.5)
            run.play.deliver(run.play.answer(run.play.receive(NUM_PROMPTS)[0]))
            run.play.wait_for(lambda: run.play.controller.describe_progress().startswith("1 of 4"))
            run.play.controller._record.flush()
        run.close()

    def _first_step(self, run: PlayedRun) -> None:
        play = run.play
        first, second, third, fourth = play.receive(NUM_PROMPTS)
        play.deliver(broken_off(play.answer(first), TIMEOUT))
        [first] = play.receive(1)
        component_logger.error(ENGINE_DIED)
        play.controller.take_back_prompts()
        assert play.controller.recover_lost(prompt_ids=ids([first, third, fourth])) == 1
        [second] = play.receive(1)
        with self._patch.context() as patch:
            self._verifiers_say(patch, play, Scored(1.0), *[Scored(None, "timeout")] * 3)
            play.deliver(play.answer(third))
            [third] = play.receive(1)
        with self._patch.context() as patch:
            self._verifiers_say(patch, play, Scored(None, "timeout"), *map(Scored, (1.0, 0.0, 1.0)))
            play.deliver(play.answer(fourth))
            play.wait_for(lambda: play.controller._flow.ledger[fourth.prompt_id].arrived)
        play.deliver(*(play.answer(request) for request in (first, second, third)))
        run.train(1, engine_restarts=1)

    def _second_step(self, run: PlayedRun) -> None:
        play = run.play
        first, second, third, fourth = play.receive(NUM_PROMPTS)
        play.deliver(play.answer(first, version=0))
        [first] = play.receive(1)
        for _ in range(2):
            play.deliver(broken_off(play.answer(third), TIMEOUT))
            [third] = play.receive(1)
        cut = _cut_off(play.answer(second))
        play.deliver(cut, *(play.answer(request) for request in (first, third, fourth)))
        run.train(2, engine_restarts=1)

    @staticmethod
    def _verifiers_say(patch: Any, play: Play, *scored: Scored) -> None:
        said: Future[list[Scored]] = Future()
        said.set_result(list(scored))
        patch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: said)

    def resumed(self) -> PlayedRun:
        """The second start, which has trained step 3 and goes on; its record ends, because the disk is full."""
        run = self._begin()
        run.play.controller.load(2, str(self.directory / "state.npz"))
        run.start(2)
        play = run.play
        with WarningEvents(run.journal):
            play.deliver(*(play.answer(request, MIXED) for request in play.receive(NUM_PROMPTS)))
            run.train(3)
            logging.getLogger("open_instruct.record.writer").warning(DISK_IS_FULL)
        return run


def _cut_off(result: GenerationResult) -> GenerationResult:
    return replace(ended_by(result, *["length"] * len(result.samples)))
