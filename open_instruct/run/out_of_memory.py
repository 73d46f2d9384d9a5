"""Memory that ran out, as one message: in which part, how much it wanted and how much was there, and what would help most.

The texts that are recognised are those of torch 2.13, vLLM 0.32, Ray 2.60, Python and Linux.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from open_instruct.cluster.failures import ComponentDied
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.run.main_memory import NodeLoad
from open_instruct.run.memory_advice import gib, less_main_memory, savings
from open_instruct.run.memory_needs import needed_on_device

Kind = Literal["GPU memory", "KV cache memory", "main memory", "/dev/shm"]
NUM_PROPOSALS = 3
LEARNER = "PolicyTrainer"
"""Part of the name of a learner's process."""
CONTAINER_COUNTS, MACHINE_COUNTS = Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")
"""Each has a line `oom_kill N`: processes that Linux has ended because memory ran out. The first, which only containers have,
counts those of this container; the second counts all of the machine, also those of other containers."""
UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
AMOUNT = r"(?P<{}>[\d.]+) ?(?P<{}_unit>[KMGT]i?B|B|bytes)"
DEMAND, FREE, USED, TOTAL = (AMOUNT.format(name, name) for name in ("demand", "free", "used", "total"))
TEXTS: tuple[tuple[Kind, str], ...] = (
    (
        "GPU memory",
        rf"out of memory\. Tried to allocate {DEMAND}\..*?total capacity of {TOTAL} of which {FREE} is free",
    ),
    ("GPU memory", rf"out of memory\. Tried to allocate {DEMAND}"),
    (
        "GPU memory",
        r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) (?P<total_unit>GiB)\).*?desired GPU memory utilization",
    ),
    ("GPU memory", r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError: CUDA"),
    ("KV cache memory", r"No available memory for the cache blocks"),
    ("KV cache memory", rf"{DEMAND} KV cache is needed, which is larger than the available KV cache memory \({FREE}\)"),
    ("/dev/shm", r"unable to (?:write to|open|resize|mmap) file </torch_[^\n]*No space left on device"),
    (
        "/dev/shm",
        r"insufficient shared memory|No space left on device[^\n]*/dev/shm|/dev/shm[^\n]*No space left on device",
    ),
    ("/dev/shm", r"ObjectStoreFullError"),
    ("main memory", rf"can't allocate memory: you tried to allocate {DEMAND}"),
    ("main memory", rf"Unable to allocate {DEMAND} for an array"),
    ("main memory", rf"main memory ran out: {USED} of {TOTAL} were in use(?: \((?P<users>[^)]*)\))?"),  # `root_cause`
    ("main memory", rf"Memory usage {USED} exceeded threshold of \d+B \([\d.]+% of {TOTAL} limit\)"),
    (
        "main memory",
        r"main memory ran out|due to the node running low on memory|\bMemoryError\b|Cannot allocate memory|bad_alloc",
    ),
)
"""What ran out, by the texts that say so; the first that matches counts."""


@dataclass(frozen=True)
class OutOfMemory:
    """What ran out. A number that the error does not give is None."""

    kind: Kind
    demand: int | None = None
    """Bytes that were asked for."""
    free: int | None = None
    total: int | None = None
    """Bytes in all."""
    users: str = ""
    """The processes that held most, and how much: `ray::PolicyTrainerRayProcess.train held 16.8 GiB`."""

    def __str__(self) -> str:
        numbers = [
            "" if self.demand is None else f"{gib(self.demand)} were wanted",
            "" if self.free is None else f"{gib(self.free)} were free",
            "" if self.total is None else f"there are {gib(self.total)} in all",
            self.users,
        ]
        return ", ".join(filter(None, numbers)) or "the error does not say how much was wanted"


def out_of_memory(text: str) -> OutOfMemory | None:
    """What ran out, according to the text of an error; None if no memory did."""
    for kind, pattern in TEXTS:
        if match := re.search(pattern, text, re.DOTALL):
            demand, free, used, total = (_bytes(match, name) for name in ("demand", "free", "used", "total"))
            if used is not None and total is not None:
                free = max(total - used, 0)
            return OutOfMemory(kind, demand, free, total, match.groupdict().get("users") or "")
    return None


def _bytes(match: re.Match[str], name: str) -> int | None:
    groups = match.groupdict()
    if groups.get(name) is None:
        return None
    unit = str(groups.get(f"{name}_unit") or "GiB").upper()
    return int(float(groups[name].rstrip(".")) * UNITS.get(unit, 1))


def whole_text(error: BaseException | None) -> str:
    """The text of an error and of all errors that caused it, also in other processes."""
    texts: list[str] = []
    ids: set[int] = set()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        texts.append(f"{type(error).__name__}: {error}")
        handled = None if error.__suppress_context__ else error.__context__
        error = getattr(error, "cause", None) or error.__cause__ or handled
    return "\n".join(texts)


class KernelKills:
    """Counts the processes that Linux has ended since a moment because main memory ran out."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or (CONTAINER_COUNTS if CONTAINER_COUNTS.is_file() else MACHINE_COUNTS)
        self._before = self._count()

    def _count(self) -> int:
        try:
            counts = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(counts[1]) if counts else 0

    @property
    def place(self) -> str:
        return "container" if self._file == CONTAINER_COUNTS else "machine"

    @property
    def since(self) -> int:
        return self._count() - self._before


def memory_message(args: GRPOConfig, error: BaseException, kills: KernelKills) -> str:
    """The message about a failure for which memory was too small; "" for another failure."""
    shortage = out_of_memory(whole_text(error))
    where = _part_of(error)
    if shortage is None and kills.since and re.search(r"\bdied\b|ActorDiedError|SIGKILL", whole_text(error)):
        number = kills.since
        processes = f"{number} {'process' if number == 1 else 'processes'} of this {kills.place} since the start"
        by_linux = f"it died, and Linux has ended {processes} because memory ran out"
        return f"{where} has probably run out of main memory: {by_linux}.{_cure(args, where, 'main memory')}"
    if shortage is None:
        return ""
    culprit = "learner" if LEARNER in shortage.users else where
    return f"{where} ran out of {shortage.kind}: {shortage}.{_cure(args, culprit, shortage.kind)}"


def _part_of(error: BaseException) -> str:
    """The part of the run that failed. The message of a `ComponentDied` begins with it; other errors are the driver's own."""
    if not isinstance(error, ComponentDied):
        return "the driver"
    return str(error).partition(" failed: ")[0].partition(":")[0].partition(" died")[0].strip()[:80] or "the driver"


def _cure(args: GRPOConfig, where: str, kind: Kind) -> str:
    if kind == "/dev/shm":
        return (
            " Start the container with --shm-size=16g or --ipc=host, remove what earlier runs left there (`ls /dev/shm`), or use "
            "--weight_transport ray_object."
        )
    if kind == "main memory" and args.device.kind != "cpu":
        return less_main_memory(args, [NodeLoad("", args.num_learners, args.num_engine_workers, None)])
    is_of_engine = "engine" in where or "teacher" in where
    for_part = _for_cache if kind == "KV cache memory" else _for_engine if is_of_engine else _for_learner
    proposals = list(for_part(args))
    return f" What would help most: {'; '.join(proposals[:NUM_PROPOSALS])}." if proposals else ""


def _for_learner(args: GRPOConfig) -> Iterator[str]:
    yield from map(str, savings(args, needed_on_device))


def _for_cache(args: GRPOConfig) -> Iterator[str]:
    """What makes the cache of an engine larger, or a sequence smaller that must find room in it."""
    if args.device.kind != "cpu":
        yield f"a higher --vllm_gpu_memory_utilization (it is {args.vllm_gpu_memory_utilization:g}), if the GPU has room"
        if not args.single_gpu_mode:
            yield f"--vllm_tensor_parallel_size {2 * args.vllm_tensor_parallel_size}, which needs more GPUs"
    longest = f"{args.max_prompt_token_length} + {args.longest_response} tokens"
    yield f"shorter sequences (--max_prompt_token_length, --response_length and those of evaluations: {longest})"


def _for_engine(args: GRPOConfig) -> Iterator[str]:
    """Options that make an engine smaller. On CPU few are known to."""
    from open_instruct.engines.engine_memory import engine_memory

    engine = engine_memory(args, args.device)
    if args.device.kind != "cpu":
        total, share = args.device.memory.total_bytes(), round(args.vllm_gpu_memory_utilization - 0.1, 2)
        if share > 0:
            saved = f" (saves {gib(total // 10)})" if total else ""
            yield f"--vllm_gpu_memory_utilization {share:g}{saved}, which leaves room for what is no cache"
    if args.vllm_max_num_seqs and args.vllm_max_num_seqs > 1:
        yield f"--vllm_max_num_seqs {args.vllm_max_num_seqs // 2} (how much that saves is not known)"
    size = 2 * args.vllm_tensor_parallel_size
    if not args.single_gpu_mode and args.device.kind != "cpu":
        yield f"--vllm_tensor_parallel_size {size} (saves {gib(engine.weights // 2)} on each GPU, and needs more of them)"
