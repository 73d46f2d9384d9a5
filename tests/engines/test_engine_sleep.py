"""An engine sleeps when it has nothing to do and wakes without losing a request; what it calls, and in which order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import MAX_MODEL_LEN, TIMEOUT_S, make_args

from open_instruct.data_types import PromptRequest, SamplingConfig
from open_instruct.engines.engine_sleep import EngineSleep, SleepOptions


class Play:
    """An engine that writes down what it is asked, on a clock of the test."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.calls: list[Any] = []
        self.memory = 100
        engine = SimpleNamespace(
            reset_prefix_cache=lambda: self.calls.append("reset"),
            sleep=self.go,
            wake_up=self.wake,
            memory_in_use_bytes=lambda: self.memory,
        )
        self.sleep = EngineSleep(engine, SleepOptions(calls_vllm=True, **options), clock=lambda: self.now)

    def go(self, level: int) -> None:
        self.calls.append(("sleep", level))
        self.memory -= 60

    def wake(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))


def test_it_sleeps_after_the_time_and_not_before() -> None:
    play = Play(after_s=5.0)
    play.now = 3.0
    play.sleep.note_activity()
    play.now = 7.9
    play.sleep.sleep_if_due()
    assert play.calls == []
    play.now = 8.0
    play.sleep.sleep_if_due()
    play.sleep.sleep_if_due()
    assert play.calls == ["reset", ("sleep", 1)]
    assert play.sleep.memory_released_bytes == 60  # measured
    play.now = 10.0
    play.sleep.resume()
    assert play.calls[2:] == [("wake", "weights"), ("wake", "kv_cache")]
    assert (play.sleep.num_sleeps, play.sleep.asleep_s, play.sleep.is_asleep) == (1, 2.0, False)


def test_level_2_needs_weights_before_it_serves() -> None:
    play = Play(after_s=1.0, level=2)
    play.sleep.release()
    assert play.sleep.needs_weights
    play.sleep.resume(["weights"])
    assert play.sleep.is_asleep
    play.sleep.resume(["kv_cache"])
    assert not play.sleep.is_asleep
    assert play.sleep.needs_weights
    play.sleep.weights_came()
    assert not play.sleep.needs_weights
    assert play.calls == ["reset", ("sleep", 2), ("wake", "weights"), ("wake", "kv_cache")]


def test_weights_are_kept_for_a_sleep_after_which_none_come() -> None:
    play = Play(level=2)
    play.sleep.release(on_request=True, level=1)
    play.sleep.resume()
    assert play.sleep.may_admit
    assert ("sleep", 1) in play.calls
    play.sleep.release(on_request=True)
    play.sleep.resume()
    assert not play.sleep.may_admit
    assert ("sleep", 2) in play.calls


def test_engines_that_get_weights_at_each_step_drop_them() -> None:
    assert make_args().sleep_level == 1
    assert make_args(colocate=True).sleep_level == 2
    assert make_args(colocate=True, engine_sleep_level=1).sleep_level == 1


def test_without_a_time_it_never_sleeps_by_itself() -> None:
    play = Play()
    play.now = 1e9
    play.sleep.sleep_if_due()
    assert not play.sleep.is_asleep


@pytest.mark.extended
@pytest.mark.parametrize("level", [1, 2])
def test_a_real_engine_wakes_for_prompts_and_weights_and_loses_nothing(
    ray_session: Any, prompts: list[np.ndarray], tied_model: str, level: int
) -> None:
    import time

    import torch
    from ray.util.queue import Queue
    from transformers import AutoModelForCausalLM

    from open_instruct.engines.weight_update_client import WeightUpdateClient
    from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender
    from open_instruct.run import rollout_manager

    args = make_args(engine_sleep_after_s=0.3, engine_sleep_level=level)
    queues = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
    engine = rollout_manager.create_vllm_engine(args, queues, 5, max_model_len=MAX_MODEL_LEN)
    ray_session.get(engine.ready.remote(), timeout=TIMEOUT_S)
    engine.process_queue_continuously.remote()

    def inventory() -> dict[str, Any]:
        return ray_session.get(engine.take_inventory.remote(), timeout=TIMEOUT_S)

    def wait_for(state: str) -> None:
        deadline = time.monotonic() + 20
        while inventory()["state"] != state:
            assert time.monotonic() < deadline, inventory()
            time.sleep(0.05)

    wait_for("asleep")
    requests = [PromptRequest(prompts[i], SamplingConfig(max_tokens=4, seed=i), i, f"train-{i}", 0) for i in range(3)]
    queues[0].put(requests, timeout=TIMEOUT_S)
    if level == 2:
        time.sleep(0.5)
        assert queues[1].empty()  # the weights were dropped
        assert inventory()["needs_weights"]
        assert sorted(inventory()["held"]) == ["train-0", "train-1", "train-2"]
        model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
        client = WeightUpdateClient([engine], workers_per_engine=1, timeout_s=60.0)
        client.begin(0)
        RayObjectSender(client=client, source=DeepSpeedWeightSource(model, zero_stage=0), is_sender=True).send_weights()
        assert client.report().confirmed == {0: 0}
    results: list[Any] = []
    while len(results) < 3:
        results += queues[1].get(timeout=TIMEOUT_S)
    assert sorted(result.prompt_id for result in results) == ["train-0", "train-1", "train-2"]
    wait_for("asleep")
    assert inventory()["num_sleeps"] >= 2
    ray_session.get(engine.resume_memory_occupation.remote(["weights", "kv_cache"]), timeout=TIMEOUT_S)
    ray_session.kill(engine)
    for queue in queues:
        queue.shutdown(force=True)
