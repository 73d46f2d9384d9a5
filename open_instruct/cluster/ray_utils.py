"""Functions that Ray does not provide: which devices a process sees, on which device it computes, a file that the processes of a
job share on a machine, and a lock (see `ray_lock`)."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import ray

from open_instruct.cluster.ray_lock import Lock
from open_instruct.device import gpu_uuid

__all__ = [
    "NOSET_VISIBLE_DEVICES_ENV_VARS_LIST",
    "Lock",
    "file_of_job",
    "get_physical_gpu_id",
    "ray_noset_visible_devices",
]

NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = [
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK",
    "RAY_EXPERIMENTAL_NOSET_RBLN_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_FURIOSA_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_MBLT_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_TENSTORRENT_VISIBLE_DEVICES",
]
"""Environment variables that keep Ray 2.60 from setting which devices a worker sees."""


def ray_noset_visible_devices(env: Mapping[str, str] = os.environ) -> bool:
    """Whether Ray does not set the visible devices, so a worker sees all devices of its node. Reads the values as Ray does."""
    return any(env.get(name, "").lower() in ("1", "true") for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST)


def file_of_job(name: str) -> Path:
    """Path of a file of this name that this Ray job's processes on this machine share, in the directory of Ray's session."""
    session: str = ray._private.worker._global_node.get_session_dir_path()
    return Path(session) / f"open_instruct-{ray.get_runtime_context().get_job_id()}-{name}"


def get_physical_gpu_id() -> str:
    """An id of the device on which this process computes. Two processes have the same id exactly if they share the device.

    On GPU the id is the GPU's UUID from torch: the same in every container, whichever devices are visible. On CPU it is
    `CPU-<Ray's id of the node>-<slot>`. The slot is the worker's bundle in its placement group (id of the group and index),
    because on CPU a bundle stands for a device: workers in the same bundle have the same slot, and a worker that is restarted in
    its bundle keeps the slot. A worker without a bundle has a slot of its own for as long as it lives.
    """
    return gpu_uuid() or _cpu_slot()


def _cpu_slot() -> str:
    context = ray.get_runtime_context()
    # In Ray 2.60 only the names of a worker's resources say in which bundle it is: `CPU_group_<index>_<group>`. Every worker of a
    # group also has a bit of a resource `bundle`, possibly of another bundle if the worker asked for none, so it is sorted last.
    names = sorted(context.worker.core_worker.resource_ids(), key=lambda name: name.startswith("bundle_group_"))
    indexed = (re.fullmatch(r".+_group_(\d+)_([0-9a-f]+)", name) for name in names)
    bundles = [f"{match[2]}.{match[1]}" for match in indexed if match]
    return f"CPU-{context.get_node_id()}-{bundles[0] if bundles else context.get_worker_id()}"
