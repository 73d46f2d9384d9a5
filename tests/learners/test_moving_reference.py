"""The reference policy that follows the policy: at every ZeRO stage, and over a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S
from learner_group import Learners, make_samples

from open_instruct.learners.moving_reference import MovingReference


def test_one_update_is_the_weighted_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    expected = [0.6 * new + 0.4 * old for new, old in zip(policy.parameters(), reference.parameters(), strict=True)]
    moving = MovingReference(reference, policy, every=2, alpha=0.6, rank=0, is_divided=False)
    moving.update(4)
    for parameter, wanted in zip(reference.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, wanted)
    moving.save(tmp_path)
    moving.update(6)
    assert not torch.allclose(reference.weight, expected[0])
    moving.load(tmp_path)
    moving.update(7)  # not due
    for parameter, wanted in zip(reference.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, wanted)


def test_a_reference_that_has_moved_stays_where_it_is_without_the_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)

    def fresh(every: int | None) -> tuple[torch.nn.Linear, MovingReference]:
        torch.manual_seed(1)
        policy, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        return reference, MovingReference(reference, policy, every=every, alpha=0.6, rank=0, is_divided=False)

    initial, unmoved = fresh(2)
    unmoved.save(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing to keep
    fresh(2)[1].load(tmp_path)  # an older checkpoint, without a reference
    moved, moving = fresh(2)
    moving.update(2)
    moving.save(tmp_path)
    for directory in (tmp_path, tmp_path / "again"):  # over two resumptions
        directory.mkdir(exist_ok=True)
        resumed, still = fresh(None)
        still.load(tmp_path)
        still.update(4)
        torch.testing.assert_close(resumed.weight, moved.weight)
        assert not torch.allclose(resumed.weight, initial.weight)
        still.save(directory)
    assert (tmp_path / "again" / "reference_0.pt").exists()
    assert "moves no more" in caplog.text


def test_a_reference_in_16_bits_follows_by_small_shares_and_over_a_checkpoint(tmp_path: Path) -> None:
    """The policy drifts by less than a bfloat16 can tell at a time, and the reference takes a twentieth of each way."""
    torch.manual_seed(0)
    exact, policy, reference = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    start = exact.weight.detach()
    wanted, drift = start.clone(), 1e-5 * torch.randn_like(start)
    for linear in (policy, reference):
        linear.to(torch.bfloat16).weight.data.copy_(start)

    def fresh() -> MovingReference:
        return MovingReference(reference, policy, every=1, alpha=0.05, rank=0, is_divided=False)

    moving = fresh()
    for step in range(200):
        policy.weight.data.copy_(start + step * drift)
        wanted.lerp_(policy.weight.float(), 0.05)
        moving.update(step)
        if step == 99:
            moving.save(tmp_path)
            reference.weight.data.zero_()
            moving = fresh()
            moving.load(tmp_path)
    torch.testing.assert_close(reference.weight.detach(), wanted.to(torch.bfloat16), atol=2**-12, rtol=2**-8)
    way = (reference.weight.detach().float() - start).norm() / (wanted.detach() - start).norm()
    assert way.item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_kl_is_to_the_policy_of_the_last_update(ray_session: Any, tmp_path: Path, stage: int) -> None:
    """With alpha 1 the reference is the policy after every second step: then the KL of the next step is 0, and not before."""
    options: dict[str, Any] = {"beta": 0.1, "load_ref_policy": True, "ref_policy_update_freq": 2, "alpha": 1.0}
    options["kl_denominator"] = 7.0
    learners = Learners(
        ray_session, deepspeed_stage=stage, num_learners_per_node=[2], lr_scheduler_type="constant", **options
    )
    batches = [make_samples(8, seed=seed) for seed in range(3)]
    metrics = [learners.train(batch) for batch in batches]
    kls = [one["objective/kl2_avg"] for one in metrics]
    num_tokens = sum(len(sample.response) for sample in batches[1])
    assert metrics[1]["loss/kl_avg"] == pytest.approx(0.1 * kls[1] * num_tokens / 7.0, rel=1e-5)
    assert kls[0] == pytest.approx(0, abs=1e-7)
    assert kls[1] > 1e-4
    assert kls[2] == pytest.approx(0, abs=1e-7)
    state = str(tmp_path / "state")
    ray_session.get(learners.group.async_save_checkpoint(state), timeout=TIMEOUT_S)
    unbroken = learners.train(make_samples(8, seed=4))["objective/kl2_avg"]  # moves the reference
    ray_session.get(learners.group.async_load_checkpoint(state, 3), timeout=TIMEOUT_S)
    learners.num_steps = 3
    resumed = learners.train(make_samples(8, seed=4))["objective/kl2_avg"]
    learners.close()
    assert resumed == pytest.approx(unbroken, rel=1e-6)
    assert resumed > 1e-4
