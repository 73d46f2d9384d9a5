"""Engines that die, hang or stop in the middle of an update: the run goes on, and every prompt has its one fate."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import MAX_MODEL_LEN, TIMEOUT_S, make_args
from whole_runs import Process, assert_ledger_balances, command, rows, shared_memory

from open_instruct.data_types import PromptRequest, SamplingConfig


def engine_pids(process: Process) -> list[int]:
    return [pid for pid, title in process.processes() if title.startswith("ray::LLMRayActor")]


def that_samples(pids: list[int], within_s: float = 60.0) -> int:
    """An engine that computes at this moment. Engines wait for the learner most of the time, and may then hold no prompt."""

    def cpu_s(pid: int) -> float:
        return psutil.Process(pid).cpu_times().user

    ends_at = time.monotonic() + within_s
    while time.monotonic() < ends_at:
        before = {pid: cpu_s(pid) for pid in pids}
        time.sleep(0.04)
        for pid in pids:
            if cpu_s(pid) - before[pid] > 0.02:
                return pid
    raise TimeoutError(f"no engine computed within {within_s:g} s")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_engines", [1, 3])
def test_an_engine_killed_while_it_samples_is_replaced(tmp_path: Path, num_engines: int) -> None:
    out, before = tmp_path / "out", shared_memory()
    options: dict[str, Any] = {"total_episodes": 16 * 60, "async_steps": 2, "vllm_num_engines": num_engines}
    process = Process(command(out, response_length=48, **options))
    process.wait_for_rows(out / "prompts.jsonl", 3)
    os.kill(that_samples(engine_pids(process)), signal.SIGKILL)
    code, output = process.wait(400)
    assert code == 0, output
    assert "starting it again (1 of 3)" in output
    counts = assert_ledger_balances(out)
    assert counts["reissued"] > 0  # what the engine had was not lost
    last = rows(out / "metrics.jsonl")[-1]
    assert (last["training_step"], last["engine_restarts"]) == (60, 1)
    assert max(row["max_sample_age"] for row in rows(out / "metrics.jsonl")) <= 2
    process.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_engines", "after_s"), [(1, 0.0), (1, 0.15), (2, 0.15)])
def test_a_colocated_engine_is_replaced_whenever_it_is_killed(tmp_path: Path, num_engines: int, after_s: float) -> None:
    """At different moments of a step of 0.3 s: while it samples, gives its memory back or takes weights."""
    out, before = tmp_path / "out", shared_memory()
    options: dict[str, Any] = {"num_learners_per_node": [num_engines], "vllm_num_engines": num_engines}
    process = Process(command(out, total_episodes=16 * 40, response_length=48, colocate=True, **options))
    process.wait_for_rows(out / "prompts.jsonl", 3)
    time.sleep(after_s)
    os.kill(engine_pids(process)[0], signal.SIGKILL)
    code, output = process.wait(400)
    assert code == 0, output
    assert "starting it again (1 of 3)" in output
    assert_ledger_balances(out)
    last = rows(out / "metrics.jsonl")[-1]
    assert (last["training_step"], last["engine_restarts"]) == (40, 1)
    assert max(row["max_sample_age"] for row in rows(out / "metrics.jsonl")) == 0
    process.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_does_not_take_an_update_in_time_is_replaced(tmp_path: Path) -> None:
    """Stopped, not dead: its calls stay unanswered until the limit."""
    out = tmp_path / "out"
    options = {"weight_sync_timeout_s": 6.0, "max_sync_retries": 1, "sync_retry_delay": 0.2, "async_steps": 1}
    process = Process(command(out, total_episodes=16 * 40, vllm_num_engines=2, **options))
    process.wait_for_rows(out / "prompts.jsonl", 3)
    os.kill(engine_pids(process)[0], signal.SIGSTOP)
    code, output = process.wait(400)
    assert code == 0, output
    assert "Sync attempt 2 failed" in output
    assert "did not take version" in output
    assert_ledger_balances(out)
    last = rows(out / "metrics.jsonl")[-1]
    assert last["training_step"] == 40
    assert last["sync_failures"] >= 2
    assert last["engine_restarts"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_results_nobody_takes_for_30_s_goes_on(tmp_path: Path) -> None:
    """The controller stands still: results pile up in the queue and in the engine, and nothing is lost."""
    out = tmp_path / "out"
    process = Process(command(out, total_episodes=16 * 30, async_steps=2, stopped_timeout_s=120))
    process.wait_for_rows(out / "prompts.jsonl", 3)
    [controller] = [pid for pid, title in process.processes() if title.startswith("ray::RolloutController")]
    os.kill(controller, signal.SIGSTOP)
    time.sleep(30)
    os.kill(controller, signal.SIGCONT)
    code, output = process.wait(400)
    assert code == 0, output
    assert_ledger_balances(out)
    last = rows(out / "metrics.jsonl")[-1]
    assert (last["training_step"], last["engine_restarts"]) == (30, 0)


@pytest.fixture
def own_engine(ray_session: Any, engines: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """An engine with queues of its own, of which the results queue holds one item."""
    from ray.util.queue import Queue

    from open_instruct.run import rollout_manager

    args = make_args()
    queues = Queue(actor_options={"num_cpus": 0}), Queue(maxsize=1, actor_options={"num_cpus": 0})
    engine = rollout_manager.create_vllm_engine(args, queues, 7, max_model_len=MAX_MODEL_LEN)
    ray_session.get(engine.ready.remote(), timeout=TIMEOUT_S)
    engine.process_queue_continuously.remote()
    yield SimpleNamespace(actor=engine, prompts=queues[0], results=queues[1])
    ray_session.kill(engine)
    for queue in queues:
        queue.shutdown(force=True)


def perturbed(model_path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def test_an_engine_that_dies_in_the_middle_of_an_update_does_not_hinder_the_others(
    ray_session: Any, engines: SimpleNamespace, own_engine: SimpleNamespace, tied_model: str, prompts: list[np.ndarray]
) -> None:
    from transformers import AutoModelForCausalLM

    from open_instruct.engines.weight_update_client import WeightUpdateClient
    from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender

    survivor, victim = engines.actors[0], own_engine.actor
    pid = ray_session.get(victim.pid.remote(), timeout=TIMEOUT_S)
    model = perturbed(tied_model)

    class SourceWithADeath(DeepSpeedWeightSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, weight in enumerate(super().__iter__()):
                if number == 3:
                    os.kill(pid, signal.SIGKILL)
                yield weight

    client = WeightUpdateClient([survivor, victim], workers_per_engine=1, timeout_s=60.0)
    client.begin(11)
    RayObjectSender(client=client, source=SourceWithADeath(model, zero_stage=0), is_sender=True).send_weights()
    report = client.report()
    assert report.confirmed == {0: 11}
    assert list(report.failures) == [1]
    assert "Died" in report.failures[1]

    config = SamplingConfig(max_tokens=16, seed=1)
    [result] = ray_session.get(survivor.generate_with_single_engine.remote(prompts[:1], config), timeout=TIMEOUT_S)
    ids = torch.from_numpy(np.concatenate([prompts[0], result.responses[0]])).long()[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(result.logprobs[0], logprobs[len(prompts[0]) - 1 :].numpy(), atol=1e-4)

    client = WeightUpdateClient([survivor], workers_per_engine=1, timeout_s=60.0)  # shared: leave it as it was
    original = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    RayObjectSender(client=client, source=DeepSpeedWeightSource(original, zero_stage=0), is_sender=True).send_weights()


def test_calls_of_an_update_that_was_given_up_are_refused(ray_session: Any, engines: SimpleNamespace) -> None:
    engine = engines.actors[0]
    newer = time.monotonic_ns()  # as WeightUpdateClient.begin counts
    ray_session.get(engine.start_weight_update.remote(newer), timeout=TIMEOUT_S)
    for call in (
        engine.start_weight_update.remote(newer - 1),
        engine.update_weights.remote({}, newer - 1),
        engine.finish_weight_update.remote(5, newer - 1),
    ):
        with pytest.raises(RuntimeError, match="update"):
            ray_session.get(call, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_results_that_nobody_takes_for_30_s_are_not_lost(
    ray_session: Any, own_engine: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    requests = [
        PromptRequest(prompts[i % len(prompts)], SamplingConfig(max_tokens=8, n=2, seed=i), i, f"train-{i}", 0)
        for i in range(40)
    ]
    for request in requests:
        own_engine.prompts.put([request], timeout=TIMEOUT_S)
    time.sleep(30)
    assert own_engine.results.full()
    inventory = ray_session.get(own_engine.actor.take_inventory.remote(), timeout=TIMEOUT_S)
    results: list[Any] = []
    while len(results) < len(requests):
        results += own_engine.results.get(timeout=30)
    assert sorted(result.index for result in results) == list(range(40))
    assert {f"train-{i}" for i in range(40)} >= set(inventory["held"])  # what waits to be taken counts as held
    assert inventory["held"]


def test_a_group_that_takes_too_long_comes_back_with_its_cause(ray_session: Any, prompts: list[np.ndarray]) -> None:
    from ray.util.queue import Queue

    from open_instruct.run import rollout_manager

    args = make_args(generation_timeout=0.05)
    queues = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
    engine = rollout_manager.create_vllm_engine(args, queues, 8, max_model_len=MAX_MODEL_LEN)
    engine.process_queue_continuously.remote()
    slow = SamplingConfig(max_tokens=100, n=4, seed=1, ignore_eos=True)
    requests = [
        PromptRequest(prompts[0], slow, 0, "train-0", 0),
        PromptRequest(prompts[1], SamplingConfig(max_tokens=1, seed=2), 1, "train-1", 0),
    ]
    queues[0].put(requests, timeout=TIMEOUT_S)
    results: dict[str, Any] = {}
    while len(results) < 2:
        results |= {result.prompt_id: result for result in queues[1].get(timeout=TIMEOUT_S)}
    assert results["train-0"].error.startswith("generation_timeout: over 0.05 s")
    assert results["train-0"].responses == []
    queues[0].put([PromptRequest(prompts[1], SamplingConfig(max_tokens=1, seed=2), 2, "train-2", 0)], timeout=TIMEOUT_S)
    [after] = queues[1].get(timeout=TIMEOUT_S)  # the engine goes on
    assert (after.prompt_id, after.error, len(after.responses)) == ("train-2", "", 1)
    ray_session.kill(engine)
    for queue in queues:
        queue.shutdown(force=True)


@pytest.mark.parametrize("inflight_updates", [True, False])
def test_weights_change_while_64_responses_are_sampled(
    ray_session: Any, tied_model: str, prompts: list[np.ndarray], inflight_updates: bool
) -> None:
    """In flight, responses go on with the new weights and say so; else each response is of one version. None is lost."""
    from ray.util.queue import Queue
    from transformers import AutoModelForCausalLM

    from open_instruct.engines.weight_update_client import WeightUpdateClient
    from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender
    from open_instruct.run import rollout_manager

    args = make_args(inflight_updates=inflight_updates)
    queues = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
    engine = rollout_manager.create_vllm_engine(args, queues, 9, max_model_len=MAX_MODEL_LEN)
    ray_session.get(engine.ready.remote(), timeout=TIMEOUT_S)
    engine.process_queue_continuously.remote()
    config = SamplingConfig(max_tokens=90, n=8, ignore_eos=True)
    queues[0].put([PromptRequest(prompts[i], config, i, f"train-{i}", 0) for i in range(8)], timeout=TIMEOUT_S)
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    client = WeightUpdateClient([engine], workers_per_engine=1, timeout_s=60.0)
    sender = RayObjectSender(client=client, source=DeepSpeedWeightSource(model, zero_stage=0), is_sender=True)
    for version in (1, 2, 3):
        client.begin(version)
        sender.send_weights()
        assert client.report().confirmed == {0: version}
        assert client.report().pauses_s[0] > 0
    results: list[Any] = []
    while len(results) < 8:
        results += queues[1].get(timeout=TIMEOUT_S)
    spans = [spans for result in results for spans in result.version_spans]
    assert len(spans) == 64
    for own, response in zip(spans, [r for result in results for r in result.responses], strict=True):
        assert sum(length for _, length in own) == len(response) == 90
        assert [version for version, _ in own] == sorted({version for version, _ in own})
    num_mixed = sum(len(own) > 1 for own in spans)
    assert num_mixed > 0 if inflight_updates else num_mixed == 0
    ray_session.kill(engine)
    for queue in queues:
        queue.shutdown(force=True)
