"""The learners take the step that plain torch takes, however the batch and the model are divided."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S
from learner_group import LEARNING_RATE, Learners, change_since_start, make_samples, plain_steps, relative_error

from open_instruct.storage.checkpoints import files_in


@pytest.mark.parametrize(
    ("stage", "layout", "loss", "denominator"),
    [
        (3, [2, 1], "dppo_tv", "token"),
        (2, [1, 1], "grpo", "sequence"),
        (0, [1], "dapo", "token"),
        (2, [1], "dr_grpo", "constant"),
        (3, [1], "gspo", "sequence"),
        (0, [2], "gmpo", "sequence"),
        (3, [2], "cispo", "token"),
    ],
    ids=lambda value: str(value),
)
def test_every_stage_and_layout_takes_the_step_of_plain_torch(
    ray_session: Any, tied_model: str, tmp_path: Path, stage: int, layout: list[int], loss: str, denominator: str
) -> None:
    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    own: dict[str, Any] = {"deepspeed_stage": stage, "num_learners_per_node": layout, "loss_fn": loss}
    if loss == "dppo_tv":  # the engine's log-probs are made up, so that some tokens are outside the trust region
        own |= {"dppo_delta_lower": 1.0, "dppo_delta_higher": 1.0}
    learners = Learners(ray_session, lr_scheduler_type="constant", **own)
    first, second, third = batches  # many micro-batches of unequal size
    metrics = [
        learners.train(first, pack_length=128),
        learners.train_in_pieces([second[:2], second[2:7], second[7:], []], pack_length=128),
        learners.train(third, pack_length=128),
    ]
    change = change_since_start(tied_model, learners.weights(tmp_path / "model"))
    learners.close()
    reference = plain_steps(tied_model, batches, [LEARNING_RATE] * 3, denominator=denominator)
    assert relative_error(change, reference) < 1e-4
    assert all(one["optim/grad_norm"] > 0 and one["lr"] == LEARNING_RATE for one in metrics)
    assert all(one["val/ratio"] == pytest.approx(1.0) for one in metrics)


@pytest.mark.parametrize(
    "options",
    [
        {"deepspeed_stage": 0, "gradient_checkpointing": True},
        {"deepspeed_stage": 2, "gradient_checkpointing": True, "deepspeed_offload_optimizer": True},
        {"deepspeed_stage": 3, "gradient_checkpointing": True},
        {"deepspeed_stage": 3, "deepspeed_offload_optimizer": True, "deepspeed_offload_param": True},
        {"deepspeed_stage": 3, "deepspeed_zpg": 2, "load_ref_policy": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_what_saves_memory_changes_no_step(
    ray_session: Any, tied_model: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    learners = Learners(ray_session, lr_scheduler_type="constant", num_learners_per_node=[2], **options)
    learners.train(batches[0], pack_length=128)
    learners.train_in_pieces([batches[1][:2], batches[1][2:], []], pack_length=128)
    saved = learners.group.async_save_checkpoint(str(tmp_path / "checkpoint"))
    ray_session.get(saved, timeout=TIMEOUT_S)
    learners.train(batches[2], pack_length=128)
    after = learners.weights(tmp_path / "model")
    loaded = learners.group.async_load_checkpoint(str(tmp_path / "checkpoint"), 2)
    ray_session.get(loaded, timeout=TIMEOUT_S)
    learners.num_steps = 2
    learners.train(batches[2], pack_length=128)
    again = learners.weights(tmp_path / "again")
    learners.close()
    assert (
        relative_error(change_since_start(tied_model, after), plain_steps(tied_model, batches, [LEARNING_RATE] * 3))
        < 1e-4
    )
    assert all(torch.equal(again[name], value) for name, value in after.items())


@pytest.fixture(scope="module")
def one_learner(ray_session: Any) -> Iterator[Learners]:
    learners = Learners(ray_session, lr_scheduler_type="constant")
    yield learners
    learners.close()


def test_accumulated_micro_batches_equal_one_large_batch(
    ray_session: Any, one_learner: Learners, tied_model: str, tmp_path: Path
) -> None:
    # AdamW's very first step is the sign of the gradient: where that is rounding noise, so would be the step.
    one_learner.train(make_samples(24, seed=8))
    samples = make_samples(24, seed=3)
    one_learner.ray.get(one_learner.group.async_save_checkpoint(str(tmp_path / "start")), timeout=TIMEOUT_S)
    start = one_learner.weights(tmp_path / "before")
    whole = one_learner.train(samples, pack_length=10**4)
    after_whole = one_learner.weights(tmp_path / "whole")
    ray_session.get(one_learner.group.async_load_checkpoint(str(tmp_path / "start"), 0), timeout=TIMEOUT_S)
    parts = one_learner.train(samples, pack_length=48)
    after_parts = one_learner.weights(tmp_path / "parts")
    change = {name: after_parts[name] - start[name] for name in start}
    reference = {name: after_whole[name] - start[name] for name in start}
    assert relative_error(change, reference) < 1e-4
    assert parts["loss/policy_avg"] == pytest.approx(whole["loss/policy_avg"], abs=1e-6)
    assert parts["optim/grad_norm"] == pytest.approx(whole["optim/grad_norm"], rel=1e-4)


def test_pieces_equal_the_whole_batch(ray_session: Any, one_learner: Learners, tmp_path: Path) -> None:
    one_learner.train(make_samples(24, seed=8))
    samples = make_samples(24, seed=9)
    one_learner.ray.get(one_learner.group.async_save_checkpoint(str(tmp_path / "start")), timeout=TIMEOUT_S)
    start = one_learner.weights(tmp_path / "before")
    whole = one_learner.train(samples)
    after_whole = one_learner.weights(tmp_path / "whole")
    ray_session.get(one_learner.group.async_load_checkpoint(str(tmp_path / "start"), 0), timeout=TIMEOUT_S)
    pieces = one_learner.train_in_pieces([samples[20:], samples[:3], samples[3:20]])
    after_pieces = one_learner.weights(tmp_path / "pieces")
    change = {name: after_pieces[name] - start[name] for name in start}
    assert relative_error(change, {name: after_whole[name] - start[name] for name in start}) < 1e-4
    for name in ("loss/policy_avg", "policy/entropy_avg", "optim/grad_norm", "val/ratio", "lr"):
        assert pieces[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_responses_that_share_a_prompt_take_the_same_step(
    ray_session: Any, one_learner: Learners, tmp_path: Path
) -> None:
    one_learner.train(make_samples(24, seed=8))
    samples = make_samples(24, seed=12)
    samples = [replace(sample, query=samples[number // 8].query) for number, sample in enumerate(samples)]
    one_learner.ray.get(one_learner.group.async_save_checkpoint(str(tmp_path / "start")), timeout=TIMEOUT_S)
    start = one_learner.weights(tmp_path / "before")
    alone = one_learner.train(samples)
    after_alone = one_learner.weights(tmp_path / "alone")
    ray_session.get(one_learner.group.async_load_checkpoint(str(tmp_path / "start"), 0), timeout=TIMEOUT_S)
    shared = one_learner.train(samples, pairs_per_token=1e6)
    after_shared = one_learner.weights(tmp_path / "shared")
    change = {name: after_shared[name] - start[name] for name in start}
    assert relative_error(change, {name: after_alone[name] - start[name] for name in start}) < 1e-4
    for name in (
        "loss/policy_avg",
        "policy/entropy_avg",
        "optim/grad_norm",
        "val/ratio",
        "debug/vllm_vs_local_logprob_diff_mean",
    ):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


def test_a_step_that_cannot_be_made_leaves_the_weights_as_they_are(one_learner: Learners, tmp_path: Path) -> None:
    one_learner.train(make_samples(8, seed=10))  # the optimizer has momentum
    before = one_learner.weights(tmp_path / "before")
    samples = make_samples(6, seed=11)
    poisoned = [*samples[:3], replace(samples[3], advantage=float("nan")), *samples[4:]]
    masked = [replace(sample, mask=np.zeros_like(sample.mask)) for sample in samples]
    without_update = [
        one_learner.train(poisoned, pack_length=48),
        one_learner.train_in_pieces([poisoned[:2], poisoned[2:]]),
        one_learner.train(masked),
        one_learner.train_in_pieces([masked[:2], masked[2:], []]),
    ]
    after = one_learner.weights(tmp_path / "after")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [one["optim/skipped_steps"] for one in without_update] == [1, 1, 1, 1]
    assert [one["optim/nonfinite_steps"] for one in without_update] == [1, 1, 0, 0]
    assert not any("optim/grad_norm" in one for one in without_update)
    assert not any("loss/policy_avg" in one for one in without_update[2:])  # of no token
    metrics = one_learner.train(samples)
    assert metrics["optim/skipped_steps"] == 0
    assert metrics["optim/grad_norm"] > 0


def test_saved_model_is_read_by_transformers(one_learner: Learners, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = one_learner.weights(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_a_checkpoint_goes_on_where_it_was(ray_session: Any, one_learner: Learners, tmp_path: Path) -> None:
    one_learner.train(make_samples(8, seed=4))  # the optimizer has a past
    [written] = ray_session.get(one_learner.group.async_save_checkpoint(str(tmp_path / "state")), timeout=TIMEOUT_S)
    assert written == files_in(tmp_path / "state")  # it has put each of them on the disk
    one_learner.train(make_samples(8, seed=5))
    unbroken = one_learner.weights(tmp_path / "unbroken")
    ray_session.get(one_learner.group.async_load_checkpoint(str(tmp_path / "state"), 0), timeout=TIMEOUT_S)
    one_learner.train(make_samples(8, seed=5))
    resumed = one_learner.weights(tmp_path / "resumed")
    for name, value in unbroken.items():
        assert torch.equal(value, resumed[name]), name


def test_weights_do_not_depend_on_the_file_that_they_came_from(
    ray_session: Any, tied_model: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tied_model, copy)
    learners = Learners(ray_session, model_name_or_path=str(copy))
    learners.train(make_samples(8, seed=7))
    before = learners.weights(tmp_path / "before")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content)  # in place: somebody builds or downloads the model again
    after = learners.weights(tmp_path / "after")
    learners.close()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_mini_batches_clip_and_kl_show_up_in_the_metrics(ray_session: Any) -> None:
    learners = Learners(
        ray_session,
        num_mini_batches=4,
        num_epochs=2,
        beta=0.1,
        load_ref_policy=True,
        clip_lower=0.001,
        clip_higher=0.001,
        entropy_coef=0.01,
    )
    metrics = learners.train(make_samples(16, seed=6))
    learners.close()
    assert metrics["policy/clipfrac_avg"] > 0.1  # the later updates are off the policy that was there at first
    assert metrics["objective/kl2_avg"] > 0
    assert metrics["loss/kl_avg"] == pytest.approx(0.1 * metrics["objective/kl2_avg"], rel=1e-4)
    parts = metrics["loss/policy_avg"] + metrics["loss/kl_avg"] - 0.01 * metrics["policy/entropy_avg"]
    assert metrics["loss/total_avg"] == pytest.approx(parts, abs=1e-6)


def test_weights_are_not_sent_under_the_name_of_another_version() -> None:
    from open_instruct.learners.learner import PolicyTrainerRayProcess

    learner = PolicyTrainerRayProcess(rank=0, world_size=1)
    learner.version = 5
    assert learner.held_version() == 5
    with pytest.raises(ValueError, match="version 4 was to be sent, but these weights are of version 5"):
        learner.update_weights(4)


def test_the_cross_entropy_of_inserted_tokens_has_a_denominator_of_its_own(
    ray_session: Any, tied_model: str, tmp_path: Path
) -> None:
    """Two ranks; only a few responses hold inserted tokens, and the policy's part of the loss is 0."""
    samples = [replace(sample, advantage=0.0) for sample in make_samples(9, seed=12)]
    num_inserted = 0
    for number in (0, 4, 5):
        inserted = np.zeros(len(samples[number].response), dtype=bool)
        inserted[1:] = True
        num_inserted += int(inserted.sum())
        samples[number] = replace(samples[number], inserted=inserted, mask=~inserted)
    learners = Learners(ray_session, num_learners_per_node=[2], lr_scheduler_type="constant", ce_coef=0.5)
    metrics = learners.train(samples, pack_length=64)
    change = change_since_start(tied_model, learners.weights(tmp_path / "model"))
    learners.close()
    # `plain_steps` maximises the log-probs of a response's tokens times its advantage, divided by the number of them all.
    alone = [
        replace(samples[number], query=np.append(samples[number].query, samples[number].response[:1]), advantage=0.5)
        for number in (0, 4, 5)
    ]
    alone = [replace(sample, response=sample.response[1:], mask=sample.mask[1:]) for sample in alone]
    assert num_inserted == sum(len(sample.response) for sample in alone)
    assert relative_error(change, plain_steps(tied_model, [alone], [LEARNING_RATE])) < 1e-3
    assert metrics["loss/ce_avg"] > 0.5
    assert metrics["loss/total_avg"] == pytest.approx(metrics["loss/ce_avg"], rel=1e-6)
