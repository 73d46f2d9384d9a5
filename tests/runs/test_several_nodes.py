"""Runs on a Ray cluster of three nodes: over a real network, and when a node is lost."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, Node, ray_nodes
from whole_runs import Process, assert_ledger_balances, assert_no_shared_memory_is_left, command, rows, shared_memory

ROOT = Path(__file__).parents[2]
THREE = [Node(num_cpus=1)] * 3
"""A core each: three workers have a node of their own each."""

LEFT_IN_THE_CLUSTER = """
import json, time, ray
from ray._private.state import actors, available_resources_per_node
ray.init(log_to_driver=False)
deadline = time.monotonic() + 40  # a node that was killed counts as alive for a while
while True:
    alive = [actor["ActorClassName"] for actor in actors().values() if actor["State"] == "ALIVE"]
    available = available_resources_per_node()
    taken = [
        f"{node['NodeManagerAddress']} {name} {total - available[node['NodeID']].get(name, 0):g}"
        for node in ray.nodes() if node["Alive"] and node["NodeID"] in available
        for name, total in node["Resources"].items() if name in ("CPU", "object_store_memory")
        if total - available[node["NodeID"]].get(name, 0) > 1e-3
    ]
    if not (alive or taken) or time.monotonic() > deadline:
        break
    time.sleep(1)
print("LEFT", json.dumps({"actors": alive, "taken": taken}))
"""


TAKE_THE_REST = """
import ray, sys
ray.init(log_to_driver=False)
rest = ray.util.placement_group([{"CPU": 0.8}] * 3, strategy="STRICT_SPREAD")
assert rest.wait(30)
print("TAKEN", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def network() -> Iterator[Cluster]:
    """Three nodes, each in a network namespace of its own."""
    with ray_nodes(THREE, own_networks=True) as cluster:
        yield cluster


def start(cluster: Cluster, out: Path, **options: object) -> Process:
    return Process(cluster.on_head(command(out, **options)))


@contextmanager
def others_at_work(cluster: Cluster) -> Iterator[None]:
    """Somebody else takes what a run of one worker per node leaves over."""
    process = subprocess.Popen(
        cluster.on_head([sys.executable, "-c", TAKE_THE_REST]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # it ends when its input does
        assert process.stdout is not None
        assert any("TAKEN" in line for line in process.stdout)
        yield


def placement(out: Path) -> dict[str, str]:
    """Node address by worker, out of the driver's log."""
    text = (out / "logs" / "driver.log").read_text()
    return dict(re.findall(r"(learner \d+|engine \d+) on (\S+?)[,;\n]", text))


def assert_cluster_is_empty(cluster: Cluster) -> None:
    """No actor of a run is alive, and no resource taken."""
    done = cluster.run([sys.executable, "-c", LEFT_IN_THE_CLUSTER], timeout_s=90)
    [left] = [json.loads(line.removeprefix("LEFT ")) for line in done.stdout.splitlines() if line.startswith("LEFT ")]
    assert left["actors"] == [], done.stdout
    assert left["taken"] == [], done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_crosses_the_network(network: Cluster, tmp_path: Path) -> None:
    before, out = shared_memory(), tmp_path / "out"
    code, output = start(network, out, vllm_num_engines=2, deepspeed_stage=3).wait(300)
    assert code == 0, output
    places = placement(out)
    assert sorted(places.values()) == network.node_addresses  # a node for each of the three workers
    metrics = rows(out / "metrics.jsonl")
    assert [row["training_step"] for row in metrics] == [1, 2, 3, 4]
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics[:1]) < 1e-3
    assert_ledger_balances(out)
    assert_cluster_is_empty(network)
    assert_no_shared_memory_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_learners_on_two_nodes_share_a_step(network: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output = start(network, out, num_learners_per_node=[1, 1], deepspeed_stage=2).wait(300)
    assert code == 0, output
    places = placement(out)
    assert len({places["learner 0"], places["learner 1"]}) == 2
    assert [row["training_step"] for row in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert_ledger_balances(out)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_room", [True, False])
def test_a_run_goes_on_without_a_node_of_engines(network: Cluster, tmp_path: Path, *, has_room: bool) -> None:
    """Its engine moves to another node, or is given up when the others are full."""
    out = tmp_path / "out"
    # Ray takes up to 15 s to notice that a node is gone, and another engine starts in 20 s: the run has to last longer.
    num_steps = 400 if has_room else 200
    options: dict[str, Any] = {"total_episodes": 16 * num_steps, "vllm_num_engines": 2, "response_length": 32}
    options["learning_rate"] = 1e-6  # answers stay as mixed as they are, so a step takes as long as the first
    with nullcontext() if has_room else others_at_work(network):
        process = start(network, out, **options)
        process.wait_for_rows(out / "prompts.jsonl", 3)
        places = placement(out)
        network.kill_node(network.node_addresses.index(places["engine 1"]))
        code, output = process.wait(400)
    assert code == 0, output
    assert re.search(rf"node {re.escape(places['engine 1'])} \(\w+\) was lost, and with it engine 1", output), output
    assert output.count("was lost, and with it") == 1, output
    given_up = "engine 1 is given up: no node has room for it. Going on with 1 engine"
    assert (given_up in output) is not has_room, output
    metrics = rows(out / "metrics.jsonl")
    assert metrics[-1]["training_step"] == num_steps
    engines_at_work = {row["agent_loop/slowest/engine_id"] for row in metrics[-40:]}
    assert engines_at_work == ({0, 1} if has_room else {0})
    if has_room:
        [address] = re.findall(r"engine 1 moves to (\S+)", output)
        assert address in {places["learner 0"], places["engine 0"]}
        assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics[-40:]) < 1e-2  # it has the weights
    assert_ledger_balances(out)
    assert_cluster_is_empty(network)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_learners_with_disks_of_their_own_are_told_before_anything_is_trained(network: Cluster, tmp_path: Path) -> None:
    """Where nodes do not share the output directory, no run could go on from their checkpoints."""
    out = tmp_path / "out"
    out.mkdir()
    for enter in network.enter[1:]:
        subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", str(out)], check=True, timeout=30)
    code, output = start(network, out, num_learners_per_node=[1, 1], deepspeed_stage=2).wait(150)
    assert code == 2, output
    assert f"--output_dir {out}" in output
    assert re.search(r"is not the same directory as on 10\.77\.0\.[23], where learners write", output), output
    assert not (out / "prompts.jsonl").read_text()
    assert_cluster_is_empty(network)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_node_with_a_learner_ends_the_run_and_is_named(network: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(network, out, num_learners_per_node=[1, 1], total_episodes=16 * 400)
    process.wait_for_rows(out / "prompts.jsonl", 3)
    places = placement(out)
    numbers = {network.node_addresses.index(places[name]) for name in ("learner 0", "learner 1")}
    [number] = numbers - {0}  # the driver is on node 0
    network.kill_node(number)
    code, output = process.wait(120)
    assert code == 1, output
    assert re.search(
        rf"node {re.escape(network.node_addresses[number])} \(\w+\) was lost, and with it learner", output
    ), output
    assert_cluster_is_empty(network)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_too_much_for_the_cluster_is_told_within_a_minute(tmp_path: Path) -> None:
    with ray_nodes(THREE) as cluster:
        code, output = start(cluster, tmp_path / "out", num_learners_per_node=[4, 4, 4, 4]).wait(60)
    assert code == 2, output
    assert "no node has room for 4 learners" in output
    assert "16 + 1" not in output
    assert output.count("of 1 CPU free") == 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_three_nodes_learn_as_one_does(tmp_path: Path) -> None:
    """Held-out accuracy after 60 steps of the demo, three seeds each: the means differ by less than 5 points."""
    accuracies: dict[str, list[float]] = {"one": [], "three": []}
    issued: dict[str, list[int]] = {"one": [], "three": []}
    steps = ["--total_episodes", str(256 * 60), "--checkpoint_state_freq", "-1", "--local_eval_every", "60"]
    for seed in (1, 2, 3):
        for name, finals in accuracies.items():
            out = tmp_path / f"{name}-{seed}"
            words = ["bash", str(ROOT / "scripts/train/debug/cpu_demo.sh"), *steps, "--seed", str(seed)]
            words += ["--output_dir", str(out)]
            if name == "three":
                with ray_nodes(THREE, own_networks=True) as cluster:
                    code, output = Process(cluster.on_head([*words, "--vllm_num_engines", "2"])).wait(400)
                assert len(set(placement(out).values())) == 3
            else:
                code, output = Process(words).wait(400)
            assert code == 0, output
            summary = json.loads((out / "summary.json").read_text())
            finals.append(summary["eval_accuracy_after"])
            issued[name].append(summary["prompts"]["issued"])
    assert issued["one"] == issued["three"]
    means = {name: sum(finals) / len(finals) for name, finals in accuracies.items()}
    assert abs(means["one"] - means["three"]) < 0.05, accuracies
    assert min(means.values()) > 0.7, accuracies
