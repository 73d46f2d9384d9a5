"""CPU and GPU side by side: every answer that depends on the device."""

import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct import device as device_module
from open_instruct.config.checks import weight_transport_fits
from open_instruct.device import Device, allocator_env, current_device, doubts_about_machine, places_explained
from open_instruct.device_memory import DeviceMemory


@pytest.fixture
def cpu() -> Device:
    return current_device(kind="cpu")


@pytest.fixture
def gpu() -> Device:
    return Device("cuda", "bfloat16", "sdpa")


@pytest.fixture
def shared_gpu() -> Device:
    return Device("cuda", "bfloat16", "sdpa", colocated=True)


def test_kind_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_sees_a_gpu", lambda: True)
    assert current_device().kind == "cuda"
    monkeypatch.setattr(device_module, "_sees_a_gpu", lambda: False)
    assert current_device().kind == "cpu"


def test_the_device_is_that_of_the_cluster_if_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head node may be the one that has no GPU."""
    monkeypatch.setattr(device_module, "_sees_a_gpu", lambda: False)
    assert make_args().device.kind == "cpu"
    on_gpu = make_args(device_type="cuda").device
    assert (on_gpu.kind, on_gpu.dtype, on_gpu.weight_transport) == ("cuda", "bfloat16", "nccl")


def test_learners_share_memory_with_engines_only_where_each_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody opens is never given back by CUDA."""
    four: dict[str, Any] = {"device_type": "cuda", "colocate": True, "num_learners_per_node": [4]}
    assert make_args(**four, vllm_num_engines=2, vllm_tensor_parallel_size=2).device.weight_transport == "ipc"
    assert make_args(**four, vllm_num_engines=2).device.weight_transport == "ray_object"
    monkeypatch.setattr(device_module, "_sees_a_gpu", lambda: True)
    [mistake] = weight_transport_fits(make_args(**four, vllm_num_engines=2, weight_transport="ipc"))
    assert "ipc needs a worker of an engine on the GPU of each learner" in mistake


def test_dtype(cpu: Device) -> None:
    assert cpu.dtype == "float32"
    assert str(cpu.torch_dtype) == "torch.float32"
    assert current_device(kind="cuda").dtype == "bfloat16"
    assert current_device(kind="cuda", dtype="float32").dtype == "float32"


def test_backend_and_weight_transport(cpu: Device, gpu: Device, shared_gpu: Device) -> None:
    assert [d.collective_backend for d in (cpu, gpu, shared_gpu)] == ["gloo", "nccl", "nccl"]
    assert [d.weight_transport for d in (cpu, gpu, shared_gpu)] == ["ray_object", "nccl", "ipc"]


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("cpu", "bfloat16", "sdpa"),
        ("cuda", "float32", "sdpa"),
        ("cuda", "auto", "flash_attention_2"),
    ],
)
def test_attention_and_the_layout_that_follows(kind: device_module.Kind, dtype: str, expected: str) -> None:
    device = current_device(kind=kind, dtype=dtype)
    assert device.attn_implementation == expected
    assert device.collation_layout == ("packed" if expected == "flash_attention_2" else "padded")
    assert current_device(kind=kind, attn_implementation="eager").attn_implementation == "eager"


def test_one_thread_per_worker_on_cpu_alone(cpu: Device, gpu: Device) -> None:
    assert cpu.threads_per_worker == 1
    assert gpu.threads_per_worker is None


def test_workers_that_take_turns_share_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "num_cores", lambda: 6)
    threads = [current_device(kind="cpu", workers_at_once=number).threads_per_worker for number in (1, 2, 4, 9)]
    assert threads == [6, 3, 1, 1]
    assert current_device(kind="cpu", workers_at_once=3, learners_at_once=1).threads_per_learner == 6
    assert current_device(kind="cpu").threads_per_learner == 1
    assert current_device(kind="cuda", learners_at_once=1).threads_per_learner is None
    assert current_device(kind="cpu", workers_at_once=2).actor_env["OMP_NUM_THREADS"] == "3"
    assert current_device(kind="cuda", workers_at_once=2).threads_per_worker is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"async_steps": 0, "streaming": True}, True),
        ({"async_steps": 0}, False),  # bit for bit the same every time
        ({"teacher_model_name_or_path": "x"}, False),
    ],
)
def test_cores_are_divided_anew_where_learners_and_engines_compute_at_once(
    options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    device = make_args(**options).device
    assert device.shares_cores == expected
    assert ("GOMP_SPINCOUNT" in device.actor_env) == expected
    assert not current_device(kind="cuda", shares_cores=True).shares_cores
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert not expected or device.actor_env["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"async_steps": 0}, 1),
        ({"async_steps": 0, "vllm_num_engines": 3}, 3),
        ({"async_steps": 0, "streaming": True}, None),
        ({"async_steps": 0, "max_staleness_allowed": 1}, None),
        ({"async_steps": 0, "teacher_model_name_or_path": "x"}, None),
        ({"colocate": True}, 1),
        ({"async_steps": 0, "num_learners_per_node": [1, 1]}, None),
    ],
)
def test_engines_and_learners_take_turns_where_a_run_is_on_policy(
    options: dict[str, Any], expected: int | None
) -> None:
    device = make_args(**{"num_learners_per_node": [2], **options}).device
    assert device.workers_at_once == expected
    assert device.learners_at_once == (None if expected is None else 2)


def test_actors_on_gpu_share_the_cores(monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device) -> None:
    """Ray would give each of them one thread."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device_module, "num_cores", lambda: 96)
    monkeypatch.setattr(Device, "num_places", 8)
    assert (cpu.actor_env["OMP_NUM_THREADS"], gpu.actor_env["OMP_NUM_THREADS"]) == ("1", "12")
    monkeypatch.setattr(Device, "num_places", 0)  # a head node without a GPU: others are taken to have eight
    assert gpu.actor_env["OMP_NUM_THREADS"] == "12"
    monkeypatch.setattr(device_module, "num_cores", lambda: 4)
    monkeypatch.setattr(Device, "num_places", 8)
    assert gpu.actor_env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert gpu.actor_env["OMP_NUM_THREADS"] == "5"


def test_logits_at_once_are_more_on_gpu(cpu: Device, gpu: Device) -> None:
    assert (cpu.logits_at_once, gpu.logits_at_once) == (2**24, 2**27)


def test_learners_that_hand_tensors_over_have_plain_segments(
    monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device, shared_gpu: Device
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert shared_gpu.learner_env == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": ""}
    assert gpu.learner_env == {}
    assert cpu.learner_env == {"DS_ACCELERATOR": "cpu"}
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert shared_gpu.learner_env == {}


def test_learners_on_cpu_allocate_with_jemalloc_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device
) -> None:
    for name in ("LD_PRELOAD", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_module.platform, "machine", lambda: "x86_64")
    env = allocator_env(cpu)
    assert Path(env["LD_PRELOAD"]).name == "libjemalloc.so"
    assert env["MALLOC_CONF"] == device_module.JEMALLOC_OPTIONS
    assert allocator_env(gpu) == {}
    monkeypatch.setenv("MALLOC_CONF", "narenas:1")
    assert allocator_env(cpu)["MALLOC_CONF"] == "narenas:1"
    monkeypatch.setattr(device_module.platform, "machine", lambda: "aarch64")
    assert allocator_env(cpu) == {}
    monkeypatch.setattr(device_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so.4")
    assert allocator_env(cpu) == {}


MANY_TENSORS = """
import torch
def own_mib():
    return int([line for line in open("/proc/self/status") if line.startswith("RssAnon")][0].split()[1]) >> 10
held, before = [], own_mib()
for _ in range(200):
    held.append(torch.ones(1000))
    torch.ones(2**18)  # 1 MiB, which is free again at once
print(own_mib() - before)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere learners keep glibc's allocator")
def test_a_learner_uses_freed_memory_again(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    """With glibc each of the 200 tensors takes memory of its own."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    program = [sys.executable, "-c", MANY_TENSORS]
    grown_mib = int(subprocess.check_output(program, env=os.environ | allocator_env(cpu), text=True, timeout=60))
    assert grown_mib < 30


FREED_TENSORS = """
import time, torch
def own_mib():
    return int([line for line in open("/proc/self/status") if line.startswith("RssAnon")][0].split()[1]) >> 10
before = own_mib()
tensors = [torch.ones(2**18) for _ in range(512)]  # 512 MiB
del tensors
deadline = time.monotonic() + 60
while own_mib() - before > 50 and time.monotonic() < deadline:
    time.sleep(0.2)
    for _ in range(2000):
        torch.ones(1000)
print(own_mib() - before)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere learners keep glibc's allocator")
def test_a_learner_gives_back_what_it_no_longer_uses(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    """Lengths differ from step to step. If freed memory were kept for ever, a real model would fill the machine."""
    for name in ("LD_PRELOAD", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    program = [sys.executable, "-c", FREED_TENSORS]
    held_mib = int(subprocess.check_output(program, env=os.environ | allocator_env(cpu), text=True, timeout=120))
    assert held_mib < 50


def test_little_shared_memory_is_told_on_gpu_nodes(monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device) -> None:
    monkeypatch.setattr(device_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 * 2**20))
    assert doubts_about_machine(cpu) == []
    [doubt] = doubts_about_machine(gpu)
    assert doubt.startswith("/dev/shm has 64 MiB: too little")
    assert "--shm-size" in doubt
    monkeypatch.setattr(device_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=2**34))
    assert doubts_about_machine(gpu) == []


@pytest.mark.parametrize(("num_cores", "warns"), [(1, True), (15, True), (16, False)])
def test_few_cores_for_the_gpus_of_a_node_are_told(
    monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device, num_cores: int, warns: bool
) -> None:
    """Slurm gives a task one core by default, while Ray counts the machine's."""
    monkeypatch.setattr(device_module.shutil, "disk_usage", lambda _: SimpleNamespace(total=2**34))
    monkeypatch.setattr(device_module, "num_cores", lambda: num_cores)
    monkeypatch.setattr(Device, "num_places", 8)
    assert doubts_about_machine(cpu) == []
    assert len(doubts_about_machine(gpu)) == warns
    for doubt in doubts_about_machine(gpu):
        assert f"may use {num_cores} CPU {'core' if num_cores == 1 else 'cores'}, and" in doubt
        assert "the node has 8 GPUs" in doubt
        assert "srun --cpus-per-task" in doubt
    monkeypatch.setattr(Device, "num_places", 0)  # a head node without a GPU says nothing about the nodes with GPUs
    assert doubts_about_machine(gpu) == []


def test_cores_are_those_of_the_affinity_mask(gpu: Device) -> None:
    """What `taskset -c 0`, or a Slurm step with one CPU, leaves to this process."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert device_module.num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_vllm_takes_over_the_current_stream(monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device) -> None:
    """vLLM patches `torch.cuda.set_stream` to note the stream; without a stream noted it makes a new one current."""
    import torch

    noted: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", noted.append)
    cpu.keep_current_stream()
    assert noted == []
    gpu.keep_current_stream()
    assert noted == ["the default stream"]


def test_ray_resources_of_as_many_workers_as_there_are_places_fit(cpu: Device) -> None:
    assert device_module.WORKERS_PER_CORE * cpu.place_resources["CPU"] < 1
    assert cpu.places_per_core * cpu.place_resources["CPU"] == 1
    assert "GPU" not in cpu.place_resources


def test_a_place_on_gpu_is_a_gpu(gpu: Device) -> None:
    assert gpu.place_resources["GPU"] == 1
    assert gpu.places_per_core == 1


def test_engine_environment_of_the_user_wins(monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    on_cpu, on_gpu = (device.engine_env(enforce_eager=False, ready_timeout_s=1234.5) for device in (cpu, gpu))
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_cpu["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert on_gpu == {"VLLM_ENGINE_READY_TIMEOUT_S": "1235"}, (
        "vLLM would give up after 600 s, however long a run may wait"
    )
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "77")
    assert gpu.engine_env(enforce_eager=False, ready_timeout_s=1234.5) == {"VLLM_ENGINE_READY_TIMEOUT_S": "77"}


def test_threads_of_an_engine_on_gpu_are_for_loading(monkeypatch: pytest.MonkeyPatch, gpu: Device) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert gpu.engine_env(enforce_eager=False, ready_timeout_s=1.0)["VLLM_OMP_NUM_THREADS_SET_BY_VLLM"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" not in gpu.engine_env(enforce_eager=False, ready_timeout_s=1.0)


def test_engine_arguments(cpu: Device, gpu: Device) -> None:
    lengths: dict[str, Any] = {"max_model_len": 10**6, "gpu_memory_utilization": 0.5}
    on_cpu, on_gpu = (d.engine_kwargs(**lengths, enforce_eager=True) for d in (cpu, gpu))
    assert on_cpu["ir_op_priority"]["rms_norm"][0] == "open_instruct_cpu"
    assert "ir_op_priority" not in cpu.engine_kwargs(**lengths, enforce_eager=False), "torch.compile fuses norms itself"
    assert on_cpu["max_num_batched_tokens"] == 10**6, "the longest prompt goes in in one piece"
    assert "gpu_memory_utilization" not in on_cpu
    assert on_gpu == {"gpu_memory_utilization": 0.5}


def test_what_a_server_is_started_with(monkeypatch: pytest.MonkeyPatch, cpu: Device, gpu: Device) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert cpu.server_words[:4] == ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"]
    assert cpu.server_env(gpu=3) == {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert gpu.server_words == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.server_env(gpu=3) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    assert gpu.server_env(gpu=1) == {"CUDA_VISIBLE_DEVICES": "GPU-5"}
    with pytest.raises(ValueError, match="GPU 2 was asked for, and CUDA_VISIBLE_DEVICES has 2"):
        gpu.server_env(gpu=2)


def test_memory_in_use_grows_with_what_is_held(cpu: Device) -> None:
    before = cpu.memory.in_use_bytes()
    held = b"x" * 50_000_000
    grown = cpu.memory.in_use_bytes() - before
    assert 40_000_000 < grown < 100_000_000, f"{grown} bytes more for {len(held)}"


def test_places_are_bounded_by_cores_and_by_memory(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    monkeypatch.setattr(device_module, "num_cores", lambda: 2)
    monkeypatch.setattr(device_module, "memory_of_machine_bytes", lambda: 100 * 2**30)
    assert cpu.num_places == 8
    monkeypatch.setattr(device_module, "memory_of_machine_bytes", lambda: 6 * 2**30)
    assert cpu.num_places == 3
    assert places_explained(cpu).startswith("2 CPU cores, at most 4 workers each; 6 GiB")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_cores_are_those_that_the_process_may_use(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    groups = [
        (directory.replace("/sys/fs/cgroup", str(tmp_path)), *names) for directory, *names in device_module.CPU_QUOTAS
    ]
    monkeypatch.setattr(device_module, "CPU_QUOTAS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert device_module.num_cores() == expected


def test_device_travels_between_processes(shared_gpu: Device) -> None:
    assert pickle.loads(pickle.dumps(shared_gpu)) == shared_gpu


@pytest.mark.parametrize("status", [0, 2])
def test_main_memory_for_a_gpu_is_page_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    import torch

    locked: list[tuple[int, int, int]] = []
    unlocked: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *what: (locked.append(what), status)[1], cudaHostUnregister=unlocked.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    zeros = torch.zeros
    forgotten: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda *size, device: (forgotten.append(device), zeros(*size))[1])
    buffer = DeviceMemory("cuda").host_buffer(5000)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (5000,))
    assert locked == [(buffer.data_ptr(), 5000, 0)]
    assert ("5000 bytes of main memory are not page-locked (error 2 of CUDA)" in caplog.text) == bool(status)
    assert forgotten == ["cuda"] * bool(status)
    place = buffer.data_ptr()
    del buffer
    assert unlocked == [place] * (not status)
    assert DeviceMemory("cpu").host_buffer(7).shape == (7,)
    assert len(locked) == 1


@pytest.mark.gpu
def test_on_a_real_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = current_device()
    assert device.kind == "cuda"
    assert device.num_places == torch.cuda.device_count()
    before = device.memory.in_use_bytes()
    held = torch.zeros(2**20, device=device.kind, dtype=device.torch_dtype)
    assert device.memory.in_use_bytes() - before == held.nbytes


def test_nothing_heavy_is_imported_to_describe_a_device() -> None:
    program = "import sys; from open_instruct.device import current_device;"
    program += "current_device(kind='cpu').engine_env(enforce_eager=True, ready_timeout_s=1.0);"
    program += "assert not {'torch', 'ray', 'vllm', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
