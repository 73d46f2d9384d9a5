"""Adapters: the step that real learners take is that of plain torch with peft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S
from learner_group import LEARNING_RATE, Learners, make_samples

from open_instruct.data_types import TrainingSample

BETA = 0.1


def plain_steps(
    model_path: str, adapter: Path, batches: list[list[TrainingSample]]
) -> tuple[dict[str, torch.Tensor], float]:
    """The adapter after these steps in plain torch with peft, sequence by sequence, and the KL of the last step (k3)."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, kl = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0), 0.0
    for samples in batches:
        optimizer.zero_grad()
        num_tokens, kl = sum(len(sample.response) for sample in samples), 0.0
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.query, sample.response])).long()[None]

            def logprobs(ids: torch.Tensor = ids, sample: TrainingSample = sample) -> torch.Tensor:
                every = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                return every[len(sample.query) - 1 :]

            new = logprobs()
            with model.disable_adapter(), torch.no_grad():
                reference = logprobs()
            difference = reference - new
            k3 = difference.exp() - 1 - difference
            loss = (-sample.advantage * new + BETA * k3).sum() / num_tokens
            kl += float(k3.detach().sum()) / num_tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}, kl


@pytest.mark.parametrize(("stage", "layout"), [(0, [1]), (2, [1, 1]), (3, [2])], ids=str)
def test_a_step_is_that_of_plain_torch_with_peft(
    ray_session: Any, tied_model: str, tmp_path: Path, stage: int, layout: list[int]
) -> None:
    from safetensors.torch import load_file

    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    learners = Learners(
        ray_session,
        use_peft=True,
        lora_r=8,
        lr_scheduler_type="constant",
        deepspeed_stage=stage,
        num_learners_per_node=layout,
        beta=BETA,
        kl_estimator=2,
        load_ref_policy=True,
    )

    def adapter(name: str) -> dict[str, torch.Tensor]:
        directory = tmp_path / name
        saved = learners.group.async_save_model(0, directory=str(directory), with_optimizer=False)
        ray_session.get(saved, timeout=TIMEOUT_S)
        return load_file(directory / "adapter_model.safetensors")

    start = adapter("start")
    learners.train(batches[0], pack_length=128)
    learners.train_in_pieces([batches[1][:2], batches[1][2:], []], pack_length=128)
    after_two = adapter("two")
    ray_session.get(learners.group.async_save_checkpoint(str(tmp_path / "checkpoint")), timeout=TIMEOUT_S)
    metrics = learners.train(batches[2], pack_length=128)
    after_three = adapter("three")
    expected, kl = plain_steps(tied_model, tmp_path / "start", batches)
    assert set(after_three) == set(expected)
    off = sum(float((after_three[name] - expected[name]).square().sum()) for name in expected)
    moved = sum(float((expected[name] - start[name]).square().sum()) for name in expected)
    assert (off / moved) ** 0.5 < 1e-3
    assert metrics["objective/kl2_avg"] == pytest.approx(kl, rel=1e-3)
    assert kl > 1e-4

    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    num_trained = sum(value.numel() for value in expected.values())
    assert written < 1.5 * 4 * 4 * num_trained  # adapters, masters, two moments: the model itself is not in it
    for path in (tmp_path / "checkpoint").rglob("*model_states.pt"):
        kept = torch.load(path, weights_only=False)["module"]
        assert [name for name in kept if "lora_" not in name] == []  # not even the head, which is the embedding
    ray_session.get(learners.group.async_load_checkpoint(str(tmp_path / "checkpoint"), 2), timeout=TIMEOUT_S)
    assert all(torch.equal(value, after_two[name]) for name, value in adapter("loaded").items())
    learners.num_steps = 2
    learners.train(batches[2], pack_length=128)
    assert all(torch.equal(value, after_three[name]) for name, value in adapter("again").items())
    learners.close()
