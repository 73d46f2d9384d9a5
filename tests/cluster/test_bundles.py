"""Bundles with GPUs: Ray only counts them, so that any machine can pretend to have some."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.cluster import bundles
from open_instruct.cluster.placement_plan import Asked, Node

START = """
import json, os, ray, time
from open_instruct.cluster import bundles
from open_instruct.device import Device
from open_instruct.cluster.placement_plan import Asked

ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
device = Device("cuda", "bfloat16", "sdpa")
"""

OCCUPY_AND_ASK = """
asked = Asked((2,), 1, 2, device.place_resources)
reserved = bundles.reserve(asked, timeout_s=30.0)

@ray.remote
class Worker:
    def gpus(self):
        return ray.get_gpu_ids()

    def visible(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

actor = reserved.group, reserved.actor
learners = [Worker.options(**bundles.actor_options(device, actor, rank)).remote() for rank in range(2)]
taken = [str(gpu) for [gpu] in ray.get([learner.gpus.remote() for learner in learners], timeout=30)]
print("FOUND", json.dumps({
    "taken": taken,
    "visible": ray.get([learner.visible.remote() for learner in learners], timeout=30),
    "nodes": len(set(bundles.node_ids(actor) + bundles.node_ids((reserved.group, reserved.rollout)))),
    "engine": bundles.visible_gpus((reserved.group, reserved.rollout)),
}))
ray.util.remove_placement_group(reserved.group)
"""

RESERVE_WITHOUT_WAITING = """
asked = Asked((), 1, 2, device.place_resources)
[ray.kill(learner) for learner in learners]
while ray.available_resources().get("GPU") != 4:
    time.sleep(0.1)
for _ in range(3):
    ray.util.remove_placement_group(bundles.reserve(asked, timeout_s=0.0).group)
deadline = time.monotonic() + 10
while (free := ray.available_resources()).get("GPU") != 4 and time.monotonic() < deadline:
    time.sleep(0.1)
print("FOUND", json.dumps({name: free[name] for name in ("CPU", "GPU")}))
"""


def test_where_bundles_are_is_known_when_learners_compute_on_them_and_room_comes_free_again() -> None:
    """A GPU that is taken cannot be asked for its number any more. Room that is there needs no waiting, as for an engine that has
    to move while a run goes on."""
    places, free = run(OCCUPY_AND_ASK + RESERVE_WITHOUT_WAITING)
    # Neighbours, in the order of their numbers.
    assert places == {"taken": ["0", "1"], "visible": ["0", "1"], "nodes": 1, "engine": "2,3"}
    assert free == {"CPU": 4, "GPU": 4}


def test_gpus_may_have_names() -> None:
    """UUIDs, as a scheduler or a container gives them, in the order of the node's list."""
    [found] = run(OCCUPY_AND_ASK, CUDA_VISIBLE_DEVICES="GPU-d,GPU-c,MIG-b,GPU-a")
    names = ["GPU-d", "GPU-c"]
    assert found == {"taken": names, "visible": names, "nodes": 1, "engine": "MIG-b,GPU-a"}


def test_a_learner_sees_its_own_gpu_alone_even_if_ray_was_told_to_show_all() -> None:
    """Users of other trainers export this variable. Ray would set nothing, and each learner would compute on the first GPU."""
    [found] = run(OCCUPY_AND_ASK, CUDA_VISIBLE_DEVICES="3,4,5,6", RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1")
    assert found == {"taken": ["3", "4"], "visible": ["3", "4"], "nodes": 1, "engine": "5,6"}


def run(script: str, **variables: str) -> list[Any]:
    """What it prints after each FOUND, on a node of its own with 4 pretended GPUs."""
    environment = os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"} | variables
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line.removeprefix("FOUND")) for line in done.stdout.splitlines() if line.startswith("FOUND")]


def test_waiting_for_room_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal, say: the wait may be long (`--placement_timeout_s`), and there is nothing to save."""

    def on_poll() -> None:
        raise InterruptedError

    here = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "ab"))
    monkeypatch.setattr(bundles, "ray", here)
    monkeypatch.setattr(bundles, "cluster_nodes", lambda: [Node("ab", "10.0.0.2", {"GPU": 8.0}, {"GPU": 1.0})])
    with pytest.raises(InterruptedError):
        bundles.reserve(Asked((2,), 1, 1, {"GPU": 1.0}), timeout_s=600.0, on_poll=on_poll)
