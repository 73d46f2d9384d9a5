"""After every update an engine computes what the learner computes; packing loses nothing."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S, make_args
from hypothesis import given
from hypothesis import strategies as st
from weight_changes import change, largest_difference

from open_instruct.data_types import GenerationResult, SamplingConfig
from open_instruct.engines.weight_update_client import WeightUpdateClient
from open_instruct.learners import weight_sync
from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender, pack_buckets

CONFIG = SamplingConfig(max_tokens=24, n=4, seed=11)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request: pytest.FixtureRequest, ray_session: Any) -> Iterator[SimpleNamespace]:
    """An engine, and the same model on the learner's side with a sender between them."""
    from transformers import AutoModelForCausalLM

    from open_instruct.learners.logprobs import LogProbModel
    from open_instruct.run import rollout_manager

    path = request.getfixturevalue(f"{request.param}_model")
    args = make_args(model_name_or_path=path)
    if request.param == "tied":
        engine = request.getfixturevalue("engines").actors[0]
    else:
        [engine] = rollout_manager.create_rollout_engines(args, None)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    original = {name: value.clone() for name, value in module.state_dict().items()}
    client = WeightUpdateClient([engine], workers_per_engine=1, timeout_s=TIMEOUT_S)
    sender = RayObjectSender(client=client, source=DeepSpeedWeightSource(module, zero_stage=0), is_sender=True)
    yield SimpleNamespace(engine=engine, module=module, model=LogProbModel(module), client=client, sender=sender)
    module.load_state_dict(original)
    client.begin(0)
    sender.send_weights()
    if request.param == "untied":
        ray_session.kill(engine)


def test_vllm_keeps_the_current_stream_before_it_joins_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining makes vLLM ask for its stream, and it would leave a new one current in the learner (vLLM 0.32)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    calls: list[str] = []
    device: Any = SimpleNamespace(weight_transport="nccl", keep_current_stream=lambda: calls.append("stream"))
    sender = SimpleNamespace()
    monkeypatch.setattr(
        WeightTransferTrainerFactory,
        "trainer_init",
        lambda info, **_: (calls.append(f"join as {info.rank}"), sender)[1],
    )
    parts: Any = {"client": SimpleNamespace(), "source": None, "find_address": lambda: ("10.0.0.1", 29500)}
    made = weight_sync.make_weight_sender(device, rank=0, num_engine_workers=2, **parts)
    assert made is sender
    assert calls == ["stream", "join as 0"]


def test_engine_and_learner_agree_after_each_update(
    ray_session: Any, pair: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    before = None
    for version in (1, 2, 3, 4):
        change(pair.module, seed=version)
        pair.client.begin(version)
        pair.sender.send_weights()
        results = ray_session.get(
            pair.engine.generate_with_single_engine.remote(prompts[:4], CONFIG), timeout=TIMEOUT_S
        )
        assert largest_difference(pair, prompts[:4], results, CONFIG.temperature) < 1e-4
        assert {span[0] for result in results for spans in result.version_spans for span in spans} == {version}
        logprobs = np.concatenate([lp for result in results for lp in result.logprobs])
        assert before is None or before.shape != logprobs.shape or np.abs(before - logprobs).max() > 1e-3
        before = logprobs


def test_engines_without_a_manager_are_asked_directly(
    ray_session: Any, pair: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    """The untied one has no queues either."""
    config = SamplingConfig(max_tokens=4)
    [result] = ray_session.get(pair.engine.generate_with_single_engine.remote(prompts[:1], config), timeout=TIMEOUT_S)
    assert len(result.responses[0]) <= 4
    in_use = pair.engine.__ray_call__.remote(lambda actor: actor._engine.memory_in_use_bytes())
    assert ray_session.get(in_use, timeout=TIMEOUT_S) > 2**28  # asked of vLLM's worker, which has torch and vLLM loaded


def test_an_update_that_breaks_off_leaves_the_old_weights(
    ray_session: Any, pair: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    def sample() -> list[GenerationResult]:
        return ray_session.get(pair.engine.generate_with_single_engine.remote(prompts[:2], CONFIG), timeout=TIMEOUT_S)

    before = sample()
    pair.client.start_weight_update()
    zeros = {name: torch.zeros_like(value) for name, value in pair.module.named_parameters()}
    for bucket in pack_buckets(iter(list(zeros.items())[:3]), max_bytes=2**30):
        pair.client.update_weights({"bucket": ray_session.put(bucket)})
    after = sample()  # the learner died here: the update is never finished
    for one, other in zip(before, after, strict=True):
        assert [r.tolist() for r in one.responses] == [r.tolist() for r in other.responses]
        assert one.version_spans == other.version_spans
    pair.sender.send_weights()  # and a new one begins from the start
    assert largest_difference(pair, prompts[:2], sample(), CONFIG.temperature) < 1e-4


def test_an_engine_that_stood_still_in_an_update_serves_no_mixture_afterwards(
    ray_session: Any, pair: SimpleNamespace, prompts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes up with calls of the old update waiting, while a newer one comes in."""
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 2**16)
    pid = ray_session.get(pair.engine.pid.remote(), timeout=TIMEOUT_S)

    class SourceWithAStop(DeepSpeedWeightSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, weight in enumerate(super().__iter__()):
                if number == 3:
                    os.kill(pid, signal.SIGSTOP)
                yield weight

    change(pair.module, seed=21)
    client = WeightUpdateClient([pair.engine], workers_per_engine=1, timeout_s=1.0)
    client.begin(21)
    source = SourceWithAStop(pair.module, zero_stage=0)
    try:
        RayObjectSender(client=client, source=source, is_sender=True).send_weights()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.report().failures == {0: "did not answer update_weights within the 1 s of the update"}

    change(pair.module, seed=22)
    pair.client.begin(22)
    pair.sender.send_weights()
    assert pair.client.report().confirmed == {0: 22}
    time.sleep(1.0)  # whatever came late
    results = ray_session.get(pair.engine.generate_with_single_engine.remote(prompts[:2], CONFIG), timeout=TIMEOUT_S)
    assert largest_difference(pair, prompts[:2], results, CONFIG.temperature) < 1e-4
    assert {span[0] for result in results for spans in result.version_spans for span in spans} == {22}


shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes=shapes, max_bytes=st.integers(1, 400), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_buckets_hold_every_parameter_once_in_order(shapes: list[tuple[int, ...]], max_bytes: int, dtype: str) -> None:
    weights = [
        (f"w{n}", torch.arange(int(np.prod(shape)), dtype=getattr(torch, dtype)).view(shape) + n)
        for n, shape in enumerate(shapes)
    ]
    unpacked = []
    for bucket in pack_buckets(iter(weights), max_bytes=max_bytes):
        assert bucket["buffer"].nbytes <= max_bytes or len(bucket["names"]) == 1
        start = 0
        for name, kind, shape in zip(bucket["names"], bucket["dtypes"], bucket["shapes"], strict=True):
            size = int(np.prod(shape)) * getattr(torch, kind).itemsize
            flat = torch.from_numpy(bucket["buffer"][start : start + size].copy())
            unpacked.append((name, flat.view(getattr(torch, kind)).view(shape)))
            start += size
        assert start == bucket["buffer"].nbytes
    assert [name for name, _ in unpacked] == [name for name, _ in weights]
    for (_, ours), (_, theirs) in zip(unpacked, weights, strict=True):
        assert torch.equal(ours, theirs)
