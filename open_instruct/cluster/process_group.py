"""Connects the learners: opens a store on the first rank, and lets all ranks join the process group."""

import functools
import os
import socket
from datetime import timedelta
from types import ModuleType

import ray
import torch

from open_instruct.cluster.network_interface import OF_GLOO, OF_NCCL, network_interface
from open_instruct.device import Device
from open_instruct.system.absent_modules import absent


def import_deepspeed() -> ModuleType:
    """DeepSpeed, for the first time in this process. Its autotuner (0.19) would import mlflow: two CPU-seconds of each start."""
    with absent("mlflow"):
        import deepspeed
    return deepspeed


def open_store(world_size: int, timeout_s: float) -> "torch.distributed.TCPStore":
    """Listen on this node for the other ranks. The port is held from now on, so that no other program can take it."""
    host = ray.util.get_node_ip_address()
    door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = door.getsockname()[1]
    return torch.distributed.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=door.detach(),  # by default a store listens on every interface, without a password
    )


def free_address() -> tuple[str, int]:
    """This node's address and a port that is free at this moment. Use the port at once."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def join(
    device: Device,
    address: tuple[str, int],
    store: "torch.distributed.TCPStore | None",
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> None:
    """Join the process group of torch.distributed and of DeepSpeed. `store` is the open store on the first rank, else None."""
    host, port = address
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",  # Ray shows each actor only its own device
        **device.learner_env,
        **network_interface(OF_GLOO, OF_NCCL),
    )
    deepspeed = import_deepspeed()
    if store is None:
        store = torch.distributed.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        device.collective_backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    if device.deepspeed_compiles_collectives:
        # DeepSpeed compiles under a lock file without a deadline, so a run that was killed while compiling would hang every later
        # run. Gloo does not need the operator. `test_a_lock_that_a_killed_build_left` notices. This is not done on GPU, because
        # reading this table there would probe every CUDA operator.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=device.collective_backend, auto_mpi_discovery=False)
    # DeepSpeed 0.19 sets no timeout for its groups, so they would have the backend's default: 10 minutes with NCCL, 30 with gloo.
    deepspeed.comm.comm.cdb.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)
