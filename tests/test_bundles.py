"""Bundles with GPUs: Ray only counts them, so that any machine can pretend to have some."""

import json
import os
import subprocess
import sys

OCCUPY_AND_ASK = """
import json, ray
from open_instruct import bundles
from open_instruct.device import Device
from open_instruct.placement_plan import Asked

ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
device = Device("cuda", "bfloat16", "sdpa")
asked = Asked((2,), 1, 2, device.place_resources)
reserved = bundles.reserve(asked, timeout_s=30.0)

@ray.remote
class Worker:
    def gpus(self):
        return ray.get_gpu_ids()

actor = reserved.group, reserved.actor
learners = [Worker.options(**bundles.actor_options(device, actor, rank)).remote() for rank in range(2)]
taken = [int(gpu) for [gpu] in ray.get([learner.gpus.remote() for learner in learners], timeout=30)]
print("FOUND", json.dumps({
    "taken": taken,
    "nodes": len(set(bundles.node_ids(actor) + bundles.node_ids((reserved.group, reserved.rollout)))),
    "engine": bundles.visible_gpus((reserved.group, reserved.rollout)),
}))
"""


def test_where_bundles_are_is_known_when_learners_compute_on_them() -> None:
    """A GPU that is taken cannot be asked for its number any more."""
    environment = os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", OCCUPY_AND_ASK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [done.stderr[-2000:]]
    found = json.loads(line.removeprefix("FOUND"))
    assert found == {"taken": [0, 1], "nodes": 1, "engine": "2,3"}  # neighbours, in the order of their numbers
