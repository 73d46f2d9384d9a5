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


@pytest.mark.parametrize("stage", [2, 3])
def test_the_kl_is_to_the_policy_of_the_last_update(ray_session: Any, tmp_path: Path, stage: int) -> None:
    """With alpha 1 the reference is the policy after every second step: then the KL of the next step is 0, and not before."""
    options: dict[str, Any] = {"beta": 0.1, "load_ref_policy": True, "ref_policy_update_freq": 2, "alpha": 1.0}
    learners = Learners(
        ray_session, deepspeed_stage=stage, num_learners_per_node=[2], lr_scheduler_type="constant", **options
    )
    kls = [learners.train(make_samples(8, seed=seed))["objective/kl2_avg"] for seed in range(3)]
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
