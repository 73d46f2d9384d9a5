"""Checks that the nodes of the learners see the directories that the driver writes to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from open_instruct.run.ray_results import value_of
from open_instruct.storage import shared_storage
from open_instruct.system.counted import counted

STORAGE_S = 60.0
"""How long the nodes of the learners may take to answer whether they see a file. Each node starts a Ray process to answer."""


def check_storage(directories: Sequence[Path], learner_nodes: Sequence[str]) -> None:
    """Raises `StorageNotShared` if learners on other nodes do not see the driver's directories."""
    home = ray.get_runtime_context().get_node_id()
    other_nodes = {
        node["NodeManagerAddress"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["NodeID"] in learner_nodes and node["NodeID"] != home
    }
    ask = ray.remote(num_cpus=0, max_retries=0)(shared_storage.answer)
    for directory in directories if other_nodes else ():
        with shared_storage.probe(directory.absolute()) as path:
            refs = [
                ask.options(scheduling_strategy=place).remote(str(path), address)
                for address, place in other_nodes.items()
            ]
            answers = [value_of(ref, "the look at the storage") for ref in _answered(refs, "the look at the storage")]
            shared_storage.judge(path, dict(zip(other_nodes, answers, strict=True)))


def _answered(refs: list[Any], subject: str) -> list[Any]:
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=STORAGE_S)
    if waiting:
        raise TimeoutError(
            f"{subject}: {len(waiting)} of {counted(len(refs), 'node')} did not answer in {STORAGE_S:g} s"
        )
    return refs
