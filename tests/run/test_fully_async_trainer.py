"""Which answers of the learners a training step waits for."""

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct.data_types import RolloutBatch
from open_instruct.run import fully_async_trainer
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
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


HOOKS: Any = SimpleNamespace(before_training=lambda: None, on_idle=lambda: None)


def test_a_step_has_the_reports_of_its_last_partial_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = trainer(Learners(None), monkeypatch).train_step(1, HOOKS)
    assert step.metrics["reports"] == ["2 of learner 0", "2 of learner 1"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_partial_batch_that_fails_late_fails_the_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient would be missing in the step, whose optimizer has no way to know."""
    with pytest.raises(RuntimeError, match=f"partial batch {number} failed"):
        trainer(Learners(number), monkeypatch).train_step(1, HOOKS)


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
    hooks: Any = SimpleNamespace(**vars(HOOKS), describe_progress=lambda: "nobody")
    if is_ready:
        assert trainer(learners, monkeypatch).train_step(1, hooks).training_step == 1
    else:
        with pytest.raises(TimeoutError, match=r"Nothing came for 1800 s"):
            trainer(learners, monkeypatch).train_step(1, hooks)
