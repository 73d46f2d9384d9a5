"""Learners go on from a checkpoint that learners with other options have written, as `docs/guides/preemption.md` says."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT_S
from learner_group import LEARNING_RATE, Learners, change_since_start, make_samples, plain_steps, relative_error

pytestmark = pytest.mark.slow
STAGE_2: dict[str, Any] = {"deepspeed_stage": 2, "num_learners_per_node": [2]}
STAGE_3: dict[str, Any] = {"deepspeed_stage": 3, "num_learners_per_node": [2]}
ON_CPU = {"deepspeed_offload_optimizer": True}


def change_of_resumed_run(
    ray: Any, model: str, directory: Path, before: dict[str, Any], after: dict[str, Any]
) -> tuple[Any, dict[str, float]]:
    """How two steps with the options `before`, a checkpoint, and a third step with the options `after` change the weights; and
    the metrics of the third step."""
    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    stopped = Learners(ray, **before)
    for samples in batches[:2]:
        stopped.train(samples, pack_length=128)
    ray.get(stopped.group.async_save_checkpoint(str(directory / "checkpoint")), timeout=TIMEOUT_S)
    stopped.close()
    resumed = Learners(ray, **after)
    ray.get(resumed.group.async_load_checkpoint(str(directory / "checkpoint"), 2), timeout=TIMEOUT_S)
    resumed.num_steps = 2
    metrics = resumed.train(batches[2], pack_length=128)
    weights = resumed.weights(directory / "model")
    resumed.close()
    return change_since_start(model, weights), metrics


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STAGE_2, STAGE_2 | ON_CPU),
        (STAGE_2 | ON_CPU, STAGE_2),
        (STAGE_3, STAGE_3 | ON_CPU | {"deepspeed_offload_param": True}),
        (STAGE_3 | ON_CPU | {"deepspeed_offload_param": True}, STAGE_3),
        (STAGE_3, STAGE_3 | {"deepspeed_zpg": 2}),
        (STAGE_2, STAGE_2 | {"sequence_parallel_size": 2}),
        ({}, {"gradient_checkpointing": True, "attn_implementation": "eager"}),
        ({}, {"compile_model": True}),
        ({"compile_model": True}, {}),
    ],
    ids=str,
)
def test_what_saves_memory_or_time_may_change_at_a_resume_and_changes_no_step(
    ray_session: Any, tied_model: str, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    constant = {"lr_scheduler_type": "constant"}
    change, _ = change_of_resumed_run(ray_session, tied_model, tmp_path, before | constant, after | constant)
    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    assert relative_error(change, plain_steps(tied_model, batches, [LEARNING_RATE] * 3)) < 1e-4


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_step_has_the_rate_of_its_training_step(
    ray_session: Any, tied_model: str, tmp_path: Path, stage: int
) -> None:
    """A linear rate over four training steps; the third begins at a half of the peak, whatever a step is divided into."""
    before = {"deepspeed_stage": stage, "num_mini_batches": 4}
    change, metrics = change_of_resumed_run(ray_session, tied_model, tmp_path, before, before | {"num_mini_batches": 1})
    assert metrics["lr"] == pytest.approx(LEARNING_RATE / 2)
    assert any(value.abs().max() > 0 for value in change.values())
