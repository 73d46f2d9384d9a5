"""Which answers of the learners a training step waits for."""

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args
from driver_fakes import batch_progress

from open_instruct.data_types import RolloutBatch
from open_instruct.rollouts.batch_progress import BatchProgress, Returned
from open_instruct.run import fully_async_trainer
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer, TrainedStep
from open_instruct.system.timer import Timer

METRICS = {"avg_sample_age": 0.0, "max_sample_age": 0.0, "val/num_step_tokens": 5, "val/num_step_response_tokens": 3}


def partial_batch(number: int, *, is_last: bool) -> RolloutBatch:
    return RolloutBatch(
        training_step=1,
        rank_data=[],
        metrics=METRICS if is_last else {},
        number=number,
        is_last=is_last,
        num_global_tokens=0,
        num_global_sequences=0,
        num_samples=1,
        min_version=0,
    )


class Learners:
    """Two learners, of which one fails on a partial batch after it was sent, if `fails` names the batch."""

    def __init__(self, fails: int | None) -> None:
        self._fails = fails
        self.learners = self
        self.batches = [partial_batch(number, is_last=number == 2) for number in range(3)]
        self.merged: list[Any] = []

    def async_train(self, rollout_id: int, batch: RolloutBatch) -> list[str]:
        return [f"{batch.number} of learner {rank}" for rank in range(2)]

    def wait(self, refs: Any, **_: Any) -> Any:
        if refs == "batch":
            return [SimpleNamespace(payload=self.batches.pop(0))]
        if any(ref.startswith(f"{self._fails} of") for ref in refs):
            raise RuntimeError(f"partial batch {self._fails} failed")
        return refs


def trainer(learners: Learners, monkeypatch: pytest.MonkeyPatch) -> FullyAsyncTrainer:
    monkeypatch.setattr(fully_async_trainer, "merge_step_metrics", lambda reports: {"reports": reports})
    queue: Any = SimpleNamespace(get_ref=lambda **_: "batch")
    parts: Any = learners
    return FullyAsyncTrainer(make_args(streaming=True), parts, queue, Timer())


def train_step(trainer: FullyAsyncTrainer, hooks: Any) -> TrainedStep:
    """The first step, as the loop of `grpo_fast.py` trains it."""
    step = trainer.begin_step(1, hooks)
    while not step.has_all_batches:
        trainer.train(step, trainer.load_data_from_packing_thread(step))
    return trainer.end_step(step)


HOOKS: Any = SimpleNamespace(before_training=lambda: None, on_idle=lambda: None, tell_news=lambda: None)


def test_a_step_has_the_reports_of_its_last_partial_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_step(trainer(Learners(None), monkeypatch), HOOKS)
    assert step.metrics["reports"] == ["2 of learner 0", "2 of learner 1"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_partial_batch_that_fails_late_fails_the_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient would be missing in the step, whose optimizer has no way to know."""
    with pytest.raises(RuntimeError, match=f"partial batch {number} failed"):
        train_step(trainer(Learners(number), monkeypatch), HOOKS)


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_driver_that_was_stopped_looks_for_the_batch_once_more(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked the queue meanwhile, so that the batch may have been there for long."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr(fully_async_trainer, "time", clock)
    learners = Learners(None)
    wait = learners.wait

    def stopped(refs: Any, **settings: Any) -> Any:
        nonlocal now
        if refs == "batch" and (now == 0.0 or not is_ready):
            now += 10_000.0
            return None
        return wait(refs, **settings)

    monkeypatch.setattr(learners, "wait", stopped)
    hooks: Any = SimpleNamespace(**vars(HOOKS), describe_progress=batch_progress)
    if is_ready:
        assert train_step(trainer(learners, monkeypatch), hooks).training_step == 1
    else:
        with pytest.raises(TimeoutError, match=r"Nothing came for 1800 s"):
            train_step(trainer(learners, monkeypatch), hooks)


def lines_of_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *progress: BatchProgress
) -> list[tuple[str, str]]:
    """Level and text of what the log says while a step waits for its batch."""
    left = list(progress)

    class Late(Learners):
        def wait(self, refs: Any, **settings: Any) -> Any:
            return None if refs == "batch" and left else super().wait(refs, **settings)

    caplog.set_level("INFO")
    hooks: Any = SimpleNamespace(**vars(HOOKS), describe_progress=lambda: left.pop(0))
    train_step(trainer(Late(None), monkeypatch), hooks)
    return [(record.levelname, record.getMessage()) for record in caplog.records if "put together" in record.message]


def test_the_ordinary_first_wait_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits = [batch_progress(num_results=number) for number in (0, 0, 8, 8)]
    lines = lines_of_waiting(monkeypatch, caplog, *waits)
    assert [level for level, _ in lines] == ["INFO"] * 4


def test_a_wait_in_which_nothing_comes_for_long_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("open_instruct.rollouts.batch_progress.LONG_S", 0.0)
    ((level, _),) = lines_of_waiting(monkeypatch, caplog, batch_progress(num_results=0))
    assert level == "WARNING"


def test_a_wait_with_nothing_to_train_on_is_a_warning_that_begins_with_what_came_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"train-{number} (version 0)" for number in range(2048, 2064)]
    waits = batch_progress(
        num_back=2048,
        returned=Returned(2048, 0, 16_384),
        first_waited_for=names,
        num_being_scored=3,
        num_results=16_384,
    )
    ((level, text),) = lines_of_waiting(monkeypatch, caplog, waits)
    assert level == "WARNING"
    assert text.startswith(
        "step 1 is being put together: 2,048 of 2,048 groups are back, 0 can be trained on: mean score 0, all 0: 2,048, "
        "all 1: 0; 16 prompts are not back from the engines"
    )
