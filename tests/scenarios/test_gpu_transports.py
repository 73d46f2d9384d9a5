"""The layout that a GPU has, on CPU: the engine core in a process of its own, weights through vLLM's NCCL and IPC classes.

A core in its own process keeps stepping between two control calls, and the model changes as the weights arrive. Whatever happens
in between, no token may be sampled from a mixture.
"""

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import MAX_MODEL_LEN, TIMEOUT_S, make_args
from one_learner import CONFIG, Learner

from open_instruct.data_types import GenerationResult, PromptRequest, SamplingConfig
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.weight_link import WeightLink
from open_instruct.learners.weight_sync import DeepSpeedWeightSource

START_S = 400.0
"""Engines with a process of their own take two or three times as long to start, on a busy machine minutes."""
LONG = SamplingConfig(max_tokens=MAX_MODEL_LEN - 48, n=2, seed=3, ignore_eos=True)


class Cluster:
    """Engines whose cores are processes of their own, and a learner."""

    def __init__(self, ray: Any, transport: str, num_engines: int, model: str, num_workers: int = 1) -> None:
        from open_instruct.run import rollout_manager

        self.ray = ray
        args = make_args(
            model_name_or_path=model,
            vllm_num_engines=num_engines,
            vllm_tensor_parallel_size=num_workers,
            weight_transport=transport,
        )
        self.queues = rollout_manager.create_queues(args)
        self.engines = rollout_manager.create_rollout_engines(
            args, None, queues=self.queues, max_model_len=MAX_MODEL_LEN
        )
        ray.get([engine.ready.remote() for engine in self.engines], timeout=START_S)
        self.pids: list[int] = ray.get([engine.pid.remote() for engine in self.engines], timeout=TIMEOUT_S)
        self.served = [engine.process_queue_continuously.remote() for engine in self.engines]
        self.learner = Learner(ray, self.engines, args)

    def cores(self, number: int) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.pids[number]).children() if "EngineCore" in child.name()]

    def inventory(self, number: int) -> dict[str, Any]:
        return self.ray.get(self.engines[number].take_inventory.remote(), timeout=TIMEOUT_S)

    def begin(self, prompt: np.ndarray, prompt_id: str, config: SamplingConfig = LONG) -> None:
        """Have some engine generate."""
        self.queues[0].put([PromptRequest(prompt, config, 0, prompt_id, 0)])

    def results(self, number: int) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < number:
            results += self.queues[1].get(timeout=deadline - time.monotonic())
        return results

    def close(self) -> None:
        for engine in self.engines:
            self.ray.kill(engine)
        for queue in self.queues:
            queue.shutdown(force=True)


MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def own_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        yield


@pytest.fixture
def make_cluster(own_process: None, ray_session: Any, tied_model: str) -> Iterator[MakeCluster]:
    clusters: list[Cluster] = []

    def make(transport: str, num_engines: int = 1, num_workers: int = 1) -> Cluster:
        clusters.append(Cluster(ray_session, transport, num_engines, tied_model, num_workers))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module", params=["gloo", "shm", "ray_object"])
def one_engine(
    request: pytest.FixtureRequest, own_process: None, ray_session: Any, tied_model: str
) -> Iterator[Cluster]:
    cluster = Cluster(ray_session, request.param, 1, tied_model)
    assert len(cluster.cores(0)) == 1
    assert cluster.learner.connect(0) == {}
    yield cluster
    cluster.close()


def versions_of(results: list[GenerationResult]) -> set[int]:
    return {version for result in results for spans in result.version_spans for version, _ in spans}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- an update --------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_engine_and_learner_agree_after_each_update(one_engine: Cluster, prompts: list[np.ndarray]) -> None:
    learner = one_engine.learner
    for _ in range(3):
        report = learner.send()
        assert report.confirmed == {0: learner.version}
        assert learner.difference(0, prompts[:4]) < 1e-4
        assert versions_of(learner.sample(0, prompts[:2])) == {learner.version}
        for core in one_engine.cores(0):
            # Else the learner could not free the buffer that it has sent, with `shm` and `ipc`.
            assert f"/torch_{os.getpid()}_" not in Path(f"/proc/{core.pid}/maps").read_text()


@pytest.mark.extended
def test_no_token_is_sampled_while_weights_come(one_engine: Cluster, prompts: list[np.ndarray]) -> None:
    """Responses in flight go on with the new weights; the tokens before are exactly what the old weights sample."""
    learner, prompt = one_engine.learner, prompts[0]
    learner.send()
    before, old = learner.version, LogProbModel(copy.deepcopy(learner.module))
    one_engine.begin(prompt, "train-1")
    wait_until(lambda: one_engine.inventory(0)["held"] == ["train-1"])
    time.sleep(0.05)
    learner.send()
    [result] = one_engine.results(1)
    assert len({len(spans) for spans in result.version_spans}) == 1
    for response, logprobs, spans in zip(result.responses, result.logprobs, result.version_spans, strict=True):
        assert [version for version, _ in spans] == [before, before + 1][-len(spans) :]
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        with torch.no_grad():
            expected = (old if len(spans) == 2 else learner.model)(
                ids, torch.arange(ids.shape[1])[None], LONG.temperature
            )
        num_tokens = spans[0][1]  # later ones have a context that both weights computed
        difference = expected[0][0, len(prompt) - 1 :].numpy() - logprobs
        assert np.abs(difference[:num_tokens]).max() < 1e-4


@pytest.mark.extended
def test_an_update_that_breaks_off_leaves_no_mixture(one_engine: Cluster, prompts: list[np.ndarray]) -> None:
    """Begun twice and never finished; then one that is whole."""
    learner, engine = one_engine.learner, one_engine.engines[0]
    learner.send()
    for _ in range(2):
        one_engine.ray.get(engine.start_weight_update.remote(None), timeout=TIMEOUT_S)
    report = learner.send()
    assert report.failures == {}
    assert learner.difference(0, prompts[:2]) < 1e-4


@pytest.mark.extended
def test_an_engine_in_an_update_does_not_stand_still(one_engine: Cluster, prompts: list[np.ndarray]) -> None:
    one_engine.begin(prompts[0], "train-2")
    wait_until(lambda: one_engine.inventory(0)["held"] == ["train-2"])
    one_engine.ray.get(one_engine.engines[0].start_weight_update.remote(None), timeout=TIMEOUT_S)
    time.sleep(0.5)
    inventory = one_engine.inventory(0)
    assert (inventory["state"], inventory["idle_s"]) == ("updating", 0.0)
    one_engine.learner.send()
    assert len(one_engine.results(1)) == 1


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_each_worker_of_an_engine_joins_the_group_by_itself(
    make_cluster: MakeCluster, prompts: list[np.ndarray], num_engines: int
) -> None:
    """With tensor parallelism 2 the learner is rank 0, and the workers of two engines are ranks 1 to 4. Each worker takes its
    part of every weight. Where an engine has died, the workers of the other one are let go, and join a new group."""
    cluster = make_cluster("gloo", num_engines=num_engines, num_workers=2)
    learner, engines = cluster.learner, range(num_engines)
    assert learner.connect(*engines) == {}
    for version in (1, 2):
        assert learner.send().confirmed == dict.fromkeys(engines, version)
        for number in engines:
            assert learner.difference(number, prompts[:2]) < 1e-4
    if num_engines == 1:
        return
    os.kill(cluster.pids[1], signal.SIGKILL)
    report = learner.send()
    assert report.confirmed == {}
    assert 1 in report.failures
    assert learner.connect(0) == {}
    assert learner.send().confirmed == {0: 4}
    assert learner.difference(0, prompts[:2]) < 1e-4


# --- an engine that dies in the middle --------------------------------------------------------------------------------


class KillingSource(DeepSpeedWeightSource):
    """Kills a process when the third weight is asked for."""

    pid = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(super().__iter__()):
            if number == 3 and self.pid:
                os.kill(self.pid, signal.SIGKILL)
                self.pid = 0
            yield weight


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["actor", "core"])
def test_an_engine_that_dies_in_mid_broadcast_costs_seconds(
    make_cluster: MakeCluster, prompts: list[np.ndarray], victim: str
) -> None:
    """The other engine waits in the broadcast for a member that is gone. It is let go, keeps still, and has the weights next."""
    cluster = make_cluster("gloo", num_engines=2)
    learner = cluster.learner
    source = KillingSource(learner.module, zero_stage=0)
    learner.link = replace_source(learner, source)
    assert learner.connect(0, 1) == {}
    assert learner.send().confirmed == {0: 1, 1: 1}

    [core] = cluster.cores(1)
    source.pid = core.pid if victim == "core" else cluster.pids[1]
    started = time.monotonic()
    report = learner.send()
    assert time.monotonic() - started < 15
    assert report.confirmed == {}
    assert report.failures.keys() == {0, 1}
    assert cluster.inventory(0)["state"] == "updating"
    answer = cluster.engines[0].generate_with_single_engine.remote(prompts[:1], CONFIG)
    time.sleep(1.0)
    assert cluster.inventory(0)["num_generated_tokens"] == 0  # half of its weights are new

    started = time.monotonic()
    assert learner.connect(0) == {}
    assert learner.send().confirmed == {0: 3}
    assert time.monotonic() - started < 15
    assert versions_of(cluster.ray.get(answer, timeout=TIMEOUT_S)) == {3}
    assert learner.difference(0, prompts[:2]) < 1e-4
    wait_until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)


def replace_source(learner: Learner, source: DeepSpeedWeightSource) -> WeightLink:
    link = learner.link
    return WeightLink(source, link._device, rank=0, world_size=1, options=link._options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["start", "finish"])
def test_an_engine_that_dies_before_or_after_the_broadcast_costs_seconds(
    make_cluster: MakeCluster, prompts: list[np.ndarray], when: str
) -> None:
    cluster = make_cluster("gloo", num_engines=2)
    learner = cluster.learner
    assert learner.connect(0, 1) == {}
    client = learner.link._client
    assert client is not None
    if when == "start":
        os.kill(cluster.pids[1], signal.SIGKILL)
    else:
        finish = client.finish_weight_update
        client.finish_weight_update = lambda *args: (os.kill(cluster.pids[1], signal.SIGKILL), finish(*args))[1]  # type: ignore[method-assign]
    started = time.monotonic()
    report = learner.send()
    assert time.monotonic() - started < 15
    assert report.confirmed == ({} if when == "start" else {0: 1})
    assert 1 in report.failures
    assert learner.connect(0, 1).keys() == {1}
    assert learner.connect(0) == {}
    assert learner.send().confirmed == {0: 2}
    assert learner.difference(0, prompts[:2]) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_actor_leaves_no_engine_core_behind(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("ray_object")
    [core] = cluster.cores(0)
    os.kill(cluster.pids[0], signal.SIGKILL)
    wait_until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_actor_that_is_killed_while_it_starts_leaves_no_engine_core_behind(
    own_process: None, ray_session: Any, tied_model: str
) -> None:
    from open_instruct.run import rollout_manager

    args = make_args(model_name_or_path=tied_model, vllm_num_engines=1, weight_transport="ray_object")
    queues = rollout_manager.create_queues(args)
    before = all_cores()
    [engine] = rollout_manager.create_rollout_engines(args, None, queues=queues, max_model_len=MAX_MODEL_LEN)
    wait_until(lambda: bool(all_cores() - before))
    [core] = all_cores() - before
    os.kill(core.ppid(), signal.SIGKILL)
    wait_until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(ray_session.exceptions.RayActorError):
        ray_session.get(engine.ready.remote(), timeout=TIMEOUT_S)
    for queue in queues:
        queue.shutdown(force=True)


def all_cores() -> set[psutil.Process]:
    return {process for process in psutil.process_iter(["name"]) if "EngineCore" in (process.info["name"] or "")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_engine_core_ends_its_actor_by_name(make_cluster: MakeCluster, prompts: list[np.ndarray]) -> None:
    cluster = make_cluster("ray_object")
    [core] = cluster.cores(0)
    core.send_signal(signal.SIGSTOP)
    call = cluster.engines[0].start_weight_update.remote(None)
    time.sleep(0.5)
    core.kill()
    for answer in (call, cluster.served[0]):
        with pytest.raises(cluster.ray.exceptions.RayError, match="engine core died"):
            cluster.ray.get(answer, timeout=20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_connecting_again_gives_the_communicator_back(make_cluster: MakeCluster, prompts: list[np.ndarray]) -> None:
    cluster = make_cluster("gloo")
    [core] = cluster.cores(0)
    learner = cluster.learner
    assert learner.connect(0) == {}
    learner.send()
    before = core.num_fds()
    for _ in range(5):
        assert learner.connect(0) == {}
        assert learner.send().failures == {}
    assert core.num_fds() <= before + 2
    assert learner.difference(0, prompts[:2]) < 1e-4


# --- without engines --------------------------------------------------------------------------------------------------


def test_payloads_pass_through_msgpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to an engine core in its own process, under the environment that the device gives the engine."""
    from vllm.v1.serial_utils import MsgpackEncoder

    from open_instruct.device import Device

    handle = (torch.Tensor, (4,), torch.UntypedStorage, torch.float32, b"handle", None, 0)
    payloads: dict[Any, dict[str, Any]] = {
        "nccl": {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]},
        "ipc": {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]], "ipc_handles": {"GPU-1": handle}},
        "ray_object": {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [(2, 2)], "buffer": b"12345678"},
    }
    for transport, payload in payloads.items():
        device = Device("cuda", "bfloat16", "sdpa", chosen_transport=transport)
        with monkeypatch.context() as patch:
            for name, value in device.engine_env(enforce_eager=False, ready_timeout_s=60.0).items():
                patch.setenv(name, value)
            MsgpackEncoder().encode(("update_weights", None, (), {"update_info": payload}))


@pytest.mark.parametrize("fails", ["error", "abort"])
def test_watch_aborts_as_soon_as_the_file_is_there(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    from open_instruct.engines.vllm_weight_transfer import AbortWatch
    from open_instruct.weight_transports import ABORT_FILE

    path = tmp_path / "abort"
    monkeypatch.setenv(ABORT_FILE, str(path))
    aborted: list[float] = []
    with AbortWatch(lambda: aborted.append(time.monotonic())) as watch:
        time.sleep(0.3)
        assert not aborted
        if fails == "abort":
            path.touch()
            wait_until(lambda: bool(aborted))
    assert watch.has_aborted == (fails == "abort")


READER = """
import sys, time
import torch
storage = torch.UntypedStorage._new_shared_filename_cpu(sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3]))
print(storage[0], flush=True)
time.sleep(600)
"""


def test_a_buffer_of_the_learner_goes_though_a_reader_was_killed() -> None:
    """torch counts readers in the file itself, and one that was killed for ever."""
    from open_instruct.engines import cpu_transports

    buffer = torch.full((1000,), 7, dtype=torch.uint8)
    *_, manager, handle, num_bytes = cpu_transports._share(buffer)[1]
    path = Path("/dev/shm") / handle.decode().removeprefix("/")
    assert cpu_transports._share(buffer)[1][-2] == handle  # filled again, it is the same
    words = [sys.executable, "-c", READER, manager.decode(), handle.decode(), str(num_bytes)]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "7\n"
    reader.kill()
    reader.wait()
    assert path.exists()
    del buffer
    assert path.exists()  # whoever closes it last removes it, and fails where it is gone
    cpu_transports._share(torch.zeros(10))
    assert not path.exists()
