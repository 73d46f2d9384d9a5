"""A real engine of the teacher, against the full logits of the same model."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import TIMEOUT_S, make_args

from open_instruct.engines.engine_files import PREFIX
from open_instruct.run.teachers import create_teachers

TOP_K = 5
KNOWN = 60
"""Tokens that the policy knows in these tests: fewer than the teacher."""


@pytest.fixture(scope="module")
def teacher(ray_session: Any, untied_model: str) -> Iterator[Any]:
    from open_instruct.run import teachers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teachers, "vocabulary_size", lambda _: KNOWN)
        (actor,) = create_teachers(make_args(teacher_model_name_or_path=untied_model, distillation_top_k=TOP_K))
    ray_session.get(actor.ready.remote(), timeout=TIMEOUT_S)
    yield actor
    directories = own_directories()
    ray_session.get(actor.shutdown.options(max_task_retries=0).remote(), timeout=TIMEOUT_S)
    ray_session.kill(actor)
    assert len(directories - own_directories()) == 1  # sockets and other files of vLLM


def own_directories() -> set[str]:
    return {entry.name for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(PREFIX)}


def sequences() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    lengths = [(1, 1), (4, 9), (12, 30), (3, 2)]
    return [tuple(rng.integers(3, KNOWN, length).astype(np.int32) for length in pair) for pair in lengths]  # type: ignore[misc]


def test_the_teacher_tells_the_log_probs_of_the_full_logits(ray_session: Any, teacher: Any, untied_model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    _, said = ray_session.get(teacher.score.remote(sequences()), timeout=TIMEOUT_S)
    num_unknown = 0
    for (prompt, response), one in zip(sequences(), said, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(one.logprobs, own.numpy(), atol=2e-5)
        top = logprobs.topk(TOP_K)
        is_known = (top.indices < KNOWN).numpy()
        assert one.top_ids.shape == one.top_logprobs.shape == (len(response), TOP_K)
        assert (one.top_ids.dtype, one.top_logprobs.dtype, one.logprobs.dtype) == (np.int32, np.float32, np.float32)
        np.testing.assert_array_equal(one.top_ids[is_known], top.indices.numpy()[is_known])
        np.testing.assert_allclose(one.top_logprobs[is_known], top.values.numpy()[is_known], atol=2e-5)
        assert np.isneginf(one.top_logprobs[~is_known]).all()
        num_unknown += int((~is_known).sum())
    assert num_unknown > 0  # the tokens that the policy does not know


def test_calls_at_the_same_time_get_their_own_answers(ray_session: Any, teacher: Any) -> None:
    alone = [ray_session.get(teacher.score.remote([one]), timeout=TIMEOUT_S)[1][0] for one in sequences()]
    together = ray_session.get([teacher.score.remote([one]) for one in sequences() * 5], timeout=TIMEOUT_S)
    for number, (_, [one]) in enumerate(together):
        np.testing.assert_allclose(one.logprobs, alone[number % len(alone)].logprobs, atol=2e-5)


@pytest.mark.extended
@pytest.mark.alone
def test_a_teacher_that_is_killed_is_started_again_and_answers(ray_session: Any, teacher: Any) -> None:
    process_id, said = ray_session.get(teacher.score.remote(sequences()), timeout=TIMEOUT_S)
    os.kill(process_id, signal.SIGKILL)
    time.sleep(0.5)
    another_id, again = ray_session.get(teacher.score.remote(sequences()), timeout=TIMEOUT_S)
    assert another_id != process_id
    for one, other in zip(said, again, strict=True):
        np.testing.assert_array_equal(one.top_ids, other.top_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
