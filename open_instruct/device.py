"""What a run does differently on CPU and GPU: dtype, attention, backend, weight transport, resources, environment of the actors.

The training path asks a `Device` for these. Code that tests the kind of device by itself: the counts of memory (`--dry_run`), the
checks of options that exist for one kind alone, and kernels that look at the device of their tensors.

The driver determines the device once and passes it to the actors, because an actor that was given no GPU sees no GPU and
would answer differently.
"""

import functools
import math
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from open_instruct.device_memory import DeviceMemory, Kind, memory_of_machine_bytes
from open_instruct.weight_transports import SHARES_HANDLES, WeightTransport

if TYPE_CHECKING:
    import torch

WORKERS_PER_CORE = 4
"""Most worker processes per CPU core. More processes would only wait for each other."""
CPU_BATCHED_TOKENS = 8192
"""Most tokens of one engine step on CPU."""
CPU_KV_CACHE_BYTES = 2**30
"""Key-value cache of one engine on CPU."""
ENGINE_DEFAULTS: dict[Kind, dict[str, Any]] = {"cpu": {"block_size": 32}, "cuda": {}}
"""Engine arguments whose default is not vLLM's; `--vllm_engine_args` may set them. A prompt shares only whole blocks of the
key-value cache with others that begin alike. On CPU vLLM's blocks have 128 tokens, more than many prompts; 32 are the fewest
that its attention takes there."""
CPU_KERNELS = "open_instruct_cpu"
"""The name under which vLLM knows the implementations in `engines/cpu_kernels.py`."""
COMPILER = "torch._inductor.lowering"
"""vLLM imports torch's compiler to change a list in it, which takes three CPU-seconds of each start."""
CPU_NORMS = "rms_norm", "fused_add_rms_norm"
"""vLLM's operations that have such an implementation."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Executor on CPU that runs the model in the process of the engine core. By default (vLLM 0.32) the model has a separate process,
and the two processes wait for each other by spinning, which takes several times the CPU time on two cores."""
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
JEMALLOC_OPTIONS = "dirty_decay_ms:10000,muzzy_decay_ms:0"
"""Keeps freed memory for the next allocation, for ten seconds (jemalloc's defaults). Kept for ever (-1), it would not be
reused where lengths differ from step to step: a learner of SmolLM2-135M held 9.4 GB after 10 steps and 19 after 31."""
CPU_QUOTAS = (
    ("/sys/fs/cgroup", "cpu.max"),
    ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
"""The files that hold a container's limit of CPU time, in versions 2 and 1 of Linux's control groups: a directory and its files.
Together the files hold the microseconds that may be used, and the period: 250000 and 100000 are two and a half cores."""
SPIN_COUNT = "3000"
"""Where cores are shared: how often a thread that waits for other threads of its process checks for them before it sleeps. By
default it checks for milliseconds, although the thread that it waits for may need this very core."""
SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED_BYTES = 2**30
"""On GPU, less shared memory than this gives a warning. Containers have 64 MiB by default."""
CORES_PER_GPU = 2
"""On GPU, fewer cores for each GPU than this give a warning. A learner or an engine needs one core, and the process that calls
the engine needs another."""
GPUS_OF_A_NODE = 8
"""Number of GPUs that a node is assumed to have if the driver's own node has none."""
WORKER_BYTES = 2 * 2**30
"""Memory that a learner or an engine takes on CPU with only a tiny model."""


@dataclass(frozen=True)
class AssumedGpus:
    """GPUs that are not here, for which `--dry_run` computes."""

    memory_bytes: int
    """Memory of each GPU."""
    count: int


@dataclass(frozen=True)
class Device:
    """The device that a run computes on, and every answer that depends on it."""

    kind: Kind
    dtype: str
    """Name of the torch dtype of weights and activations, such as `bfloat16`."""
    attn_implementation: str
    """Transformers' name of the attention."""
    colocated: bool = False
    """Learners and engines share devices."""
    chosen_transport: WeightTransport | None = None
    """How weights are sent to the engines; None is the transport that fits the device."""
    workers_at_once: int | None = None
    """If learners and engines take turns: the number of engine workers that compute at the same time; otherwise None."""
    learners_at_once: int | None = None
    """If learners and engines take turns: the number of learners that compute at the same time; otherwise None."""
    shares_cores: bool = False
    """The learners and engines that compute at the moment divide the cores among themselves (`system/shared_cores.py`). False if
    learners and engines take turns: an on-policy run must give the same numbers bit for bit, but sums of gradients round
    differently with another number of threads."""
    assumed: AssumedGpus | None = None
    """GPUs to compute for in place of those of this machine."""

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype)

    @property
    def collective_backend(self) -> Literal["gloo", "nccl"]:
        """Backend of torch.distributed among the learners."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def learner_device(self) -> "torch.device":
        """The device of a learner's tensors. Ray shows each actor only its own GPU, as number 0."""
        import torch

        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @property
    def learner_env(self) -> dict[str, str]:
        """Environment variables of a learner's process, to be set before DeepSpeed is imported and before the GPU is used."""
        if self.kind == "cpu":
            return {"DS_ACCELERATOR": "cpu"}
        return _without_expandable_segments() if self.weight_transport == "ipc" else {}

    @property
    def has_faster_layers(self) -> bool:
        """Whether learners replace layers of the model by faster layers of this project (`learners/cpu_linear.py`,
        `learners/cpu_norms.py`)."""
        return self.kind == "cpu"

    @property
    def deepspeed_compiles_collectives(self) -> bool:
        """Whether DeepSpeed compiles an operator for collectives when it starts (0.19: for its CPU accelerator)."""
        return self.kind == "cpu"

    @property
    def logits_at_once(self) -> int:
        """Logits that a learner holds at a time, in float32 and about three copies: 64 MiB per copy on CPU, 512 MiB on GPU.

        Each chunk reads and writes the gradient of the whole head, so small chunks cost time. Example: with a vocabulary of
        152 k, 2**24 logits are 110 tokens.
        """
        return 2**24 if self.kind == "cpu" else 2**27

    @property
    def has_streams(self) -> bool:
        """Whether communication and fused kernels can run in parallel with computation."""
        return self.kind == "cuda"

    @property
    def weight_transport(self) -> WeightTransport:
        """How weights are sent to the engines: as chosen, or as fits the device. NCCL cannot join two processes on one GPU, hence
        `ipc`."""
        if self.chosen_transport is not None:
            return self.chosen_transport
        if self.kind == "cpu":
            return "ray_object"
        return "ipc" if self.colocated else "nccl"

    @property
    def collation_layout(self) -> Literal["padded", "packed"]:
        """Packed rows pay off only if attention skips pairs of tokens from different sequences."""
        return "packed" if self.attn_implementation == "flash_attention_2" else "padded"

    @property
    def threads_per_worker(self) -> int | None:
        """Threads of an engine's worker; None leaves the choice to torch.

        On CPU it is 1, because an engine and a learner with one thread per core each are several times slower than with one
        thread each. If they take turns, the workers that compute share the cores. With `shares_cores` the number changes later.
        """
        return None if self.kind == "cuda" else _share_of_cores(self.workers_at_once)

    @property
    def threads_per_learner(self) -> int | None:
        """Threads that a learner starts with, for `torch.set_num_threads`; None leaves the choice to torch."""
        return None if self.kind == "cuda" else _share_of_cores(self.learners_at_once)

    @property
    def place_resources(self) -> dict[str, float]:
        """Ray resources of one place: for a learner, or for one worker of an engine."""
        # Ray counts cores. If each worker took a whole core, most actors would wait for ever on a laptop. With four workers per
        # core at a fifth of a core each, a fifth of the machine is left for the other actors.
        return {"CPU": 0.2} if self.kind == "cpu" else {"CPU": 1.0, "GPU": 1.0}

    @property
    def places_per_core(self) -> int:
        """Places that share a core, although a worker would be faster with a core for itself."""
        return 5 if self.kind == "cpu" else 1

    @property
    def actor_env(self) -> dict[str, str]:
        """Environment variables of every actor that computes."""
        env = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "TOKENIZERS_PARALLELISM": "false"}
        if self.kind == "cpu":
            spin = _unless_set_by_user({"GOMP_SPINCOUNT": SPIN_COUNT}) if self.shares_cores else {}
            return env | spin | {"OMP_NUM_THREADS": str(self.threads_per_worker)}
        # Ray would set OMP_NUM_THREADS to the CPUs that an actor asks for, which is 1. Loading and copies would use one core.
        threads = max(num_cores() // (self.num_places or GPUS_OF_A_NODE), 1)
        return env | _unless_set_by_user({"OMP_NUM_THREADS": str(threads)})

    def engine_kwargs(
        self, *, max_model_len: int, gpu_memory_utilization: float, enforce_eager: bool
    ) -> dict[str, Any]:
        """Engine arguments of vLLM that depend on the device."""
        if self.kind == "cuda":
            return {"gpu_memory_utilization": gpu_memory_utilization}
        kernels = {"ir_op_priority": {key: [CPU_KERNELS, "native"] for key in CPU_NORMS}} if enforce_eager else {}
        return kernels | {
            # Prompts in one chunk, because a sampler with a seed cannot take back what it drew for a chunk (vLLM 0.32 on CPU).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len),
            "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,  # by default vLLM takes a share of the whole machine
        }

    def engine_env(self, *, enforce_eager: bool, ready_timeout_s: float) -> dict[str, str]:
        """Environment variables of an engine's process, to be set before vLLM is imported. Values that the user has set win."""
        env = {"VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(ready_timeout_s))}  # by default 600, whatever our own limit
        if self.weight_transport in SHARES_HANDLES:  # plain msgpack refuses handles of shared memory
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self.kind == "cuda":
            if (
                "OMP_NUM_THREADS" not in os.environ
            ):  # those of `actor_env` are for loading: while it serves, vLLM takes one
                env["VLLM_OMP_NUM_THREADS_SET_BY_VLLM"] = "1"
            return _unless_set_by_user(env)
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine core in the actor itself, which starts in half the time
        return _unless_set_by_user(env | _engine_env_on_cpu(enforce_eager=enforce_eager))

    @property
    def executor_of_one_worker(self) -> str | None:
        """vLLM's executor for an engine without tensor parallelism; None is vLLM's choice, which is one process on GPU."""
        return None if self.kind == "cuda" else ONE_PROCESS

    @property
    def server_words(self) -> list[str]:
        """Command-line arguments of vLLM's server that depend on the device; on CPU the server is eager."""
        if self.kind == "cuda":
            return []
        # Prompts in one chunk and the model in the engine's process, as above.
        words = ["--dtype", self.dtype, "--enforce-eager", "--no-enable-chunked-prefill"]
        return [*words, "--distributed-executor-backend", ONE_PROCESS]

    def server_env(self, *, gpu: int) -> dict[str, str]:
        """Variables to add to the environment of a server's process. Values that the user has set win.

        Args:
            gpu: number of the GPU to use, if there is any, among the GPUs that this process may use.

        Raises:
            ValueError: `CUDA_VISIBLE_DEVICES` names fewer GPUs.
        """
        if self.kind == "cuda":
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            if visible and gpu >= len(visible):
                raise ValueError(
                    f"GPU {gpu} was asked for, and CUDA_VISIBLE_DEVICES has {len(visible)}. Give more there."
                )
            return {"CUDA_VISIBLE_DEVICES": visible[gpu] if visible else str(gpu)}
        env = {
            "OMP_NUM_THREADS": str(self.threads_per_worker),
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_BYTES // 2**30),
        }
        return _unless_set_by_user(env | _engine_env_on_cpu(enforce_eager=True))

    def keep_current_stream(self) -> None:
        """Make vLLM take this thread's current CUDA stream for its own. Call it after vLLM is imported, before vLLM uses NCCL.

        Otherwise vLLM 0.32 (`vllm.utils.torch_utils.current_stream`) makes a new stream and sets it current for good. A learner
        would then train on another stream than the other ranks, and could not use memory that was freed on the default stream.
        vLLM notes which stream is set, even if that stream is already current.
        """
        if self.kind == "cuda":
            import torch

            torch.cuda.set_stream(torch.cuda.current_stream())

    def synchronize(self) -> None:
        """Wait until everything that this process has queued on its GPU is done. On CPU nothing is queued."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.kind, self.assumed.memory_bytes if self.assumed else None)

    @property
    def can_release_memory(self) -> bool:
        """Whether an engine that sleeps releases memory (vLLM 0.32: not on CPU)."""
        return self.kind == "cuda"

    @property
    def num_places(self) -> int:
        """Number of workers that this machine has room for: one per GPU, or as many as cores and memory allow."""
        if self.assumed is not None:
            return self.assumed.count
        if self.kind == "cuda":
            import torch

            return torch.cuda.device_count()
        return min(num_cores() * WORKERS_PER_CORE, memory_of_machine_bytes() // WORKER_BYTES)


def doubts_about_machine(device: Device) -> list[str]:
    """Warnings about properties of this machine that may make a run fail, given before anything starts."""
    return [] if device.kind == "cpu" else [*_doubts_about_shared_memory(), *_doubts_about_cores(device.num_places)]


def _doubts_about_shared_memory() -> Iterator[str]:
    shared = shutil.disk_usage(SHARED_MEMORY).total
    if shared < ENOUGH_SHARED_BYTES:
        yield (
            f"{SHARED_MEMORY} has {shared / 2**20:.0f} MiB: too little for NCCL, and Ray keeps its objects on disk then. "
            "Start the container with --shm-size=16g or --ipc=host."
        )


def _doubts_about_cores(num_gpus: int) -> Iterator[str]:
    """Ray counts all cores of a machine, so it starts an actor for each GPU even if a scheduler has given the job few cores."""
    cores = num_cores()
    if cores < CORES_PER_GPU * num_gpus:
        yield (
            f"This process may use {cores} CPU {'core' if cores == 1 else 'cores'}, and the node has {num_gpus} GPUs: with fewer "
            f"than {CORES_PER_GPU} cores for each GPU, loading and generation are slow, and time limits may pass. On Slurm give "
            "both `#SBATCH --cpus-per-task=N` and `srun --cpus-per-task=N` (docs/guides/multi_node.md); in a container, raise "
            "--cpus."
        )


def places_explained(device: Device) -> str:
    """Where `num_places` comes from, for a message to the user."""
    if device.kind == "cuda":
        return f"GPUs: {device.num_places}, one worker each"
    gib = memory_of_machine_bytes() / 2**30
    each = WORKER_BYTES / 2**30
    return (
        f"{num_cores()} CPU cores, at most {WORKERS_PER_CORE} workers each; {gib:.0f} GiB of memory, {each:g} GiB each"
    )


def allocator_env(device: Device) -> dict[str, str]:
    """Environment variables that make learners and engines allocate with jemalloc, which is part of Ray. Empty on GPU, because
    torch has its own allocator there, and if the user preloads a library.

    Torch asks for aligned memory, and glibc's `posix_memalign` does not reuse a freed block of the same size. With micro-batches
    of many lengths a learner would end up with several times the memory of its tensors (`benchmarks/allocators.py`), and an
    engine would hold two more copies of the model once it has received weights.
    """
    ray = find_spec("ray")
    library = Path(ray.origin if ray and ray.origin else "").parent / "core/libjemalloc.so"
    # On other processors a page can be larger than jemalloc was built for. Then no process would start.
    if device.kind == "cuda" or "LD_PRELOAD" in os.environ or platform.machine() != "x86_64" or not library.is_file():
        return {}
    return {"LD_PRELOAD": str(library), **_unless_set_by_user({"MALLOC_CONF": JEMALLOC_OPTIONS})}


def unused_imports(device: Device, *, enforce_eager: bool) -> tuple[str, ...]:
    """Modules that `import vllm` need not import. On GPU vLLM compiles some functions of an eager model, too."""
    return (COMPILER,) if enforce_eager and device.kind == "cpu" else ()


def _engine_env_on_cpu(*, enforce_eager: bool) -> dict[str, str]:
    """Environment variables that an engine on CPU needs, in an actor and in a server."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise tensor parallelism fails to bind its workers
    if enforce_eager:  # otherwise vLLM still compiles its sampler: ten seconds in the first step
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def _without_expandable_segments() -> dict[str, str]:
    """The user's settings of torch's allocator, but without expandable segments. A tensor in an expandable segment can be shared
    with another process only with rights that containers do not give."""
    changed = {}
    for name in ALLOCATOR_VARIABLES:
        settings = os.environ.get(name, "").split(",")
        plain = [setting for setting in settings if not setting.strip().startswith("expandable_segments")]
        if plain != settings:
            changed[name] = ",".join(plain)
    return changed


def _unless_set_by_user(defaults: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def current_device(
    *,
    kind: Kind | None = None,
    dtype: str = "auto",
    attn_implementation: str = "auto",
    colocated: bool = False,
    weight_transport: WeightTransport | None = None,
    workers_at_once: int | None = None,
    learners_at_once: int | None = None,
    shares_cores: bool = False,
    assumed: AssumedGpus | None = None,
) -> Device:
    """The device of this machine.

    Args:
        kind: None asks torch. Pass the kind if this process does not see the devices that the workers will see.
        dtype: `auto` is bfloat16 on GPU and float32 on CPU, where bfloat16 is emulated and many times slower.
        attn_implementation: `auto` is flash attention where it can run, else torch's scaled dot product.
        workers_at_once: as in `Device`, and so are `learners_at_once`, `assumed` and, on CPU, `shares_cores`.
    """
    kind = kind or ("cuda" if _sees_a_gpu() else "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if attn_implementation == "auto":
        attn_implementation = "flash_attention_2" if flash_attention_can_run(kind, dtype) else "sdpa"
    return Device(
        kind,
        dtype,
        attn_implementation,
        colocated,
        weight_transport,
        workers_at_once,
        learners_at_once,
        shares_cores and kind == "cpu",
        assumed,
    )


def gpu_uuid() -> str | None:
    """UUID of the GPU that this process computes on; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def flash_attention_can_run(kind: Kind, dtype: str) -> bool:
    """Whether the learners can use the FlashAttention kernels that torch has for GPUs."""
    return kind == "cuda" and dtype == "bfloat16"


def _sees_a_gpu() -> bool:
    """Torch is not asked where it is built for the CPU alone, because its import takes seconds."""
    if _torch_is_for_the_cpu_alone():
        return False
    import torch

    return torch.cuda.is_available()


@functools.cache
def _torch_is_for_the_cpu_alone() -> bool:
    return version("torch").endswith("+cpu")


def _share_of_cores(at_once: int | None) -> int:
    """Threads for each of the processes that compute at once; 1 if learners and engines do not take turns."""
    return 1 if at_once is None else max(num_cores() // at_once, 1)


def num_cores() -> int:
    """Cores that this process may use, which in a container may be fewer than the machine has."""
    return max(math.ceil(min(len(os.sched_getaffinity(0)), _cpu_quota())), 1)


def _cpu_quota() -> float:
    """CPU-seconds per second that the container may use (`docker run --cpus`); infinity without a limit."""
    for directory, *files in CPU_QUOTAS:
        try:
            quota_us, period_us = (int(word) for name in files for word in Path(directory, name).read_text().split())
        except (OSError, ValueError):  # not this version of control groups, or "max"
            continue
        if quota_us > 0:
            return quota_us / period_us
    return math.inf
