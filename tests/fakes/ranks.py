"""Ranks that train tiny models with DeepSpeed over gloo, without the rest of a learner. Their processes serve many tests."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_reduce", "all_reduce_coalesced"),
    *("all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "send", "recv", "isend", "irecv"),
)
"""Functions of torch.distributed that pass tensors to the backend."""
ANSWER_S = 60.0


class Rank:
    """One rank; `call` runs a function of a test in it. Ranks on a GPU share it, so they speak over gloo too, which here refuses
    what NCCL would refuse."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, kind: str = "cpu") -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", DS_ACCELERATOR=kind)
        torch.set_num_threads(1)
        refuse_gaps_as_nccl_does()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        start_deepspeed()
        self.rank = rank
        self.world_size = world_size

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)


def refuse_gaps_as_nccl_does() -> None:
    """In this process, make every collective raise for a tensor with gaps. NCCL does (torch 2.13, `ProcessGroupNCCL.cpp`:
    "Tensors must be contiguous"); gloo copies such a tensor silently, so a test over gloo would pass."""
    for name in COLLECTIVES:
        setattr(torch.distributed, name, _refusing_gaps(name, getattr(torch.distributed, name)))


def _refusing_gaps(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            for tensor in argument if isinstance(argument, list | tuple) else [argument]:
                if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
                    raise ValueError(
                        f"{name}: Tensors must be contiguous, got {tuple(tensor.shape)}, {tensor.stride()}"
                    )
        return collective(*args, **kwargs)

    return call


def start_deepspeed() -> None:  # apart: cloudpickle takes `deepspeed.ops` for `torch.ops` where both packages are used
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


_IDLE: dict[tuple[int, str], list[Any]] = {}
"""Ranks that no file uses now, by their number and the kind of their device."""


@contextmanager
def started_ranks(ray: Any, num_ranks: int, directory: Path, *modules: str, kind: str = "cpu") -> Iterator[list[Any]]:
    """Actors of ranks that have joined, for one file after another, because it takes seconds to import DeepSpeed. Functions of
    test files, `modules`, travel by value, because workers cannot import them."""
    for name in (__name__, "conftest", *modules):
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    actors = _IDLE.pop((num_ranks, kind), None) or _start_ranks(ray, num_ranks, directory, kind)
    yield actors
    try:
        ray.get([actor.call.remote(rank_of) for actor in actors], timeout=ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        _end(actors)
    else:
        _IDLE[num_ranks, kind] = actors


def rank_of(rank: Rank) -> int:
    return rank.rank


def _start_ranks(ray: Any, num_ranks: int, directory: Path, kind: str) -> list[Any]:
    env = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    num_gpus = 0.5 if kind == "cuda" else 0
    rank_class = ray.remote(Rank).options(num_cpus=0, num_gpus=num_gpus, runtime_env=env)
    return [rank_class.remote(rank, num_ranks, str(directory / "store"), kind) for rank in range(num_ranks)]


def end_idle_ranks() -> None:
    while _IDLE:
        _end(_IDLE.popitem()[1])


def _end(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)
