"""Memory of the device that a process computes on: memory of its GPU, or on CPU memory of the process and the machine."""

import logging
import os
import resource
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class DeviceMemory:
    """Measures memory in use and total memory, and releases memory."""

    kind: Kind
    assumed_bytes: int | None = None
    """Memory of a GPU that is not here (`--gpu_memory`)."""

    def in_use_bytes(self) -> int:
        """Memory that this process holds now: tensors on the GPU, or resident memory on CPU."""
        if self.kind == "cuda":
            import torch

            return torch.cuda.memory_allocated()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """The most memory that this process has held so far: tensors on the GPU, or resident memory on CPU."""
        if self.kind == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def in_use_by_all_bytes(self) -> int:
        """Memory in use on the GPU by all processes, because engines have processes of their own there; on CPU, by this one."""
        if self.kind == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info()
            return total - free
        return self.in_use_bytes()

    def total_bytes(self) -> int | None:
        """Memory of a GPU, or on CPU of the machine or container; None if the GPUs are on other machines."""
        if self.assumed_bytes is not None:
            return self.assumed_bytes
        if self.kind == "cuda":
            import torch

            return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
        return memory_of_machine_bytes()

    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        """(num_bytes,) uint8 in main memory, for copies from and to the device. On GPU the buffer is page-locked for as long as
        it exists, which makes copies several times as fast."""
        import torch

        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self.kind == "cuda":  # not by `pin_memory=True`, which rounds up to a power of two
            cudart: Any = torch.cuda.cudart()
            if status := int(cudart.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)):
                logger.warning(
                    "%d bytes of main memory are not page-locked (error %d of CUDA): copies to them are slow",
                    num_bytes,
                    status,
                )
                with suppress(RuntimeError):  # the error stays until the next kernel reports it
                    torch.zeros(1, device="cuda")
            else:
                unlock: Any = weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr())
                unlock.atexit = False
        return buffer

    @property
    def keeps_host_buffers(self) -> bool:
        """Whether buffers in main memory are worth keeping, because making them takes longer than copying."""
        return self.kind == "cuda"

    def return_freed(self) -> None:
        """Release memory that this process's tensors no longer use, for other processes. On CPU the allocator does so itself."""
        if self.kind == "cuda":
            import torch

            torch.cuda.ipc_collect()  # memory of tensors that an engine has opened
            torch.cuda.empty_cache()


def memory_of_machine_bytes() -> int:
    """Memory of the machine, or of the container if the container has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        return min(total, int(text))
    return total


def power_of_two(num_bytes: int) -> int:
    """The bytes of page-locked memory that torch hands out for `num_bytes`."""
    return 1 << (num_bytes - 1).bit_length()
