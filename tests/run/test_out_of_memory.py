"""Memory that ran out is told with the part, the numbers, and what would help, whatever library says it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import make_args
from ray.exceptions import OutOfMemoryError

from open_instruct.cluster.failures import ComponentDied, root_cause
from open_instruct.device import Device
from open_instruct.run.memory_advice import savings
from open_instruct.run.memory_needs import needed_on_device
from open_instruct.run.out_of_memory import KernelKills, memory_message, out_of_memory, whole_text

GIB, MIB = 2**30, 2**20
TORCH = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.19 GiB is free. "
    "Including non-PyTorch memory, this process has 78.05 GiB memory in use. "
    "Of the allocated memory 76.00 GiB is allocated by PyTorch"
)
RAY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: ab12) was 2.89GB used "
    "/ 23.54GB limit (0.122697)\n"
    "OOM kill reason: Memory usage 3068600320B exceeded threshold of 3033181696B (12.0% of 25276514304B limit)\n"
    "Object store memory usage: [- objects spillable: 0\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n"
    "3639\t1.92\tray::PolicyTrainerRayProcess.train\n"
    "1152\t0.68\t/usr/bin/python -m pytest -v\n"
    "3362\t0.07\tpython oom.py\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io. To adjust the kill "
    "threshold, set the environment variable `RAY_memory_usage_threshold` when starting Ray."
)
"""As Ray 2.60 writes it, with the middle left out."""


@pytest.mark.parametrize(
    ("text", "kind", "demand", "free", "total"),
    [
        (TORCH, "GPU memory", 2.32 * GIB, 1.19 * GIB, 79.25 * GIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", "GPU memory", 20 * MIB, None, None),
        ("CUDA error: out of memory\nCUDA kernel errors might be", "GPU memory", None, None, None),
        (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "KV cache memory",
            None,
            None,
            None,
        ),
        (
            "To serve at least one request with the models's max seq len (4096), (0.44 GiB KV cache is needed, which is larger "
            "than the available KV cache memory (0.12 GiB). Based on",
            "KV cache memory",
            0.44 * GIB,
            0.12 * GIB,
            None,
        ),
        (RAY, "main memory", None, 25276514304 - 3068600320, 25276514304),
        ("numpy: Unable to allocate 1.50 TiB for an array with shape (3,)", "main memory", 1.5 * 2**40, None, None),
        ("[Errno 12] Cannot allocate memory", "main memory", None, None, None),
        ("unable to write to file </torch_77_1_0>: No space left on device (28)", "/dev/shm", None, None, None),
        ("[Errno 28] No space left on device: '/dev/shm/psm_1'", "/dev/shm", None, None, None),
        ("DataLoader worker is killed: insufficient shared memory (shm).", "/dev/shm", None, None, None),
    ],
)
def test_texts_of_libraries_are_understood(
    text: str, kind: str, demand: float | None, free: float | None, total: float | None
) -> None:
    shortage = out_of_memory(text)
    assert shortage is not None
    assert shortage.kind == kind
    for number, expected in ((shortage.demand, demand), (shortage.free, free), (shortage.total, total)):
        assert number == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert",
        "[Errno 28] No space left on device: '/data/x'",
        "unable to open file /data/model.safetensors: No space left on device",
        "plasma store is in /dev/shm\nOSError: [Errno 28] No space left on device: '/data/x'",
        "memory",
    ],
)
def test_other_failures_are_no_shortage_of_memory(text: str) -> None:
    assert out_of_memory(text) is None


def test_what_torch_really_says_is_understood() -> None:
    """A real error: a tensor of 8 GiB in a process that may have 4."""
    program = (
        "import resource, torch; resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30)); "
        "torch.empty(8 * 2**30, dtype=torch.uint8)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    shortage = out_of_memory(done.stderr)
    assert shortage is not None, done.stderr[-500:]
    assert (shortage.kind, shortage.demand) == ("main memory", 8 * GIB)


def args_on(monkeypatch: pytest.MonkeyPatch, kind: Any) -> Any:
    args = make_args()
    monkeypatch.setattr(type(args), "device", Device(kind, "bfloat16" if kind == "cuda" else "float32", "sdpa"))
    return args


def died(where: str, text: str) -> ComponentDied:
    """As a part's failure reaches the driver: the message has the last line alone, the cause has all."""
    try:
        raise ComponentDied(f"{where} failed: OutOfMemoryError: {text.splitlines()[-1]}") from RuntimeError(text)
    except ComponentDied as error:
        return error


def test_the_message_says_where_how_much_and_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kills = KernelKills(tmp_path / "absent")
    args = args_on(monkeypatch, "cuda")
    text = memory_message(args, died("learner 0", TORCH), kills)
    assert text.startswith(
        "learner 0 ran out of GPU memory: 2.3 GiB were wanted, 1.2 GiB were free, there are 79.2 GiB in all."
    )
    assert text.count("(saves ") == 3
    assert all(str(saving) in text for saving in savings(args, needed_on_device)[:3])
    of_engine = memory_message(args, died("engine 1", TORCH), kills)
    assert "--vllm_gpu_memory_utilization 0.8" in of_engine
    assert "--pack_length" not in of_engine
    of_node = memory_message(args, died("learner 0", RAY), kills)
    assert of_node.startswith("learner 0 ran out of main memory: 20.7 GiB were free, there are 23.5 GiB in all.")
    assert "What makes it smaller" in of_node
    assert "--shm-size" in memory_message(args, died("engine 0", "insufficient shared memory (shm)"), kills)
    assert memory_message(args, ComponentDied("learner 0 failed: CUDA error: device-side assert"), kills) == ""


def test_an_engine_that_ray_ended_for_memory_names_who_holds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray ends the youngest process, which is seldom the one that grew."""
    cause = root_cause(OutOfMemoryError(RAY))
    assert cause == (
        "Ray ended it, because main memory ran out: 2.9 GiB of 23.5 GiB were in use "
        "(ray::PolicyTrainerRayProcess.train held 1.92 GiB, /usr/bin/python held 0.68 GiB)"
    )
    error, args = ComponentDied(f"engine 0 died: {cause}"), args_on(monkeypatch, "cpu")
    text = memory_message(args, error, KernelKills(tmp_path / "absent"))
    assert text.startswith(
        "engine 0 ran out of main memory: 20.6 GiB were free, there are 23.5 GiB in all, "
        "ray::PolicyTrainerRayProcess.train held 1.92 GiB, /usr/bin/python held 0.68 GiB."
    )
    assert all(str(saving) in text for saving in savings(args, needed_on_device)[:3])
    assert "vllm_max_num_seqs" not in text
    assert root_cause(OutOfMemoryError("in other words")) == "Ray ended it, because main memory ran out"


def test_a_process_that_linux_has_killed_is_a_shortage_of_main_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 5\noom_kill 3\nzone 1\n")
    kills, args = KernelKills(counts), args_on(monkeypatch, "cpu")
    error = ComponentDied("learner 0 died: the process is gone")
    assert memory_message(args, error, kills) == ""  # killed by somebody
    counts.write_text("oom_kill 4\n")
    text = memory_message(args, error, kills)
    assert text.startswith(
        "learner 0 has probably run out of main memory: it died, and Linux has ended 1 process of this machine since"
    )
    assert "(saves " in text
    assert memory_message(args, ComponentDied("learner 0 failed: KeyError: x"), kills) == ""


def test_the_texts_of_all_causes_count() -> None:
    assert "Tried to allocate" in whole_text(died("learner 0", TORCH + "\nCompile with TORCH_USE_CUDA_DSA"))


def test_a_cache_that_is_too_small_is_not_made_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM names the cache: less memory for the engine would be the wrong way, and on CPU there is no GPU to speak of."""
    error = died("engine 0", "ValueError: No available memory for the cache blocks.")
    kills = KernelKills(tmp_path / "absent")
    on_gpu = memory_message(args_on(monkeypatch, "cuda"), error, kills)
    assert on_gpu.startswith("engine 0 ran out of KV cache memory")
    assert "a higher --vllm_gpu_memory_utilization (it is 0.9)" in on_gpu
    on_cpu = memory_message(args_on(monkeypatch, "cpu"), error, kills)
    assert "GPU" not in on_cpu
    assert "shorter sequences" in on_cpu
    assert "GPU" not in memory_message(args_on(monkeypatch, "cpu"), died("engine 0", "MemoryError"), kills)


def test_an_error_of_the_driver_is_told_as_the_driver_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args, kills = args_on(monkeypatch, "cpu"), KernelKills(tmp_path / "absent")
    error = MemoryError("Unable to allocate 1.50 TiB for an array with shape (3,) and data type float64")
    assert memory_message(args, error, kills).startswith("the driver ran out of main memory: 1,536.0 GiB were wanted.")
    assert memory_message(args, RuntimeError(TORCH), kills).startswith("the driver ran out of GPU memory: 2.3 GiB")


def test_an_error_that_was_set_aside_is_no_cause() -> None:
    error = ValueError("x")
    error.__context__, error.__suppress_context__ = MemoryError(), True  # as `raise … from None` leaves it
    assert whole_text(error) == "ValueError: x"
