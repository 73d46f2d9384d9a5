"""The document of the Ray integration: its examples as they stand there, but for the import path; and room that is not there."""

import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TIMEOUT_S, make_args
from whole_runs import SUMS

from open_instruct.data_types import Box


def make_namespace(output_dir: object, **options: Any) -> SimpleNamespace:
    """Options of a run, with what the document's examples ask for beside them."""
    args = make_args(
        dataset_mixer_list=[f"{SUMS}&size=64&seed=7", "1.0"],
        dataset_mixer_eval_list=[f"{SUMS}&size=8&seed=20240", "1.0"],
        num_learners_per_node=[2],
        response_length=8,
        async_steps=0,
        filter_zero_std_samples=False,
        output_dir=str(output_dir),
        **options,
    )
    return SimpleNamespace(**vars(args), kl_coef=0, use_kl_loss=False)


@pytest.fixture(scope="module")
def system(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the document's first example makes."""
    args = make_namespace(tmp_path_factory.mktemp("run"), vllm_num_engines=2)
    wandb_run_id = "documents-loop"

    from open_instruct.run.placement_group import create_actor_group, create_placement_groups, create_rollout_manager

    pgs = create_placement_groups(args)
    actor_model = create_actor_group(args, pgs["actor"], wandb_run_id)
    rollout_manager = create_rollout_manager(args, pgs["rollout"], wandb_run_id)

    yield SimpleNamespace(args=args, pgs=pgs, actor_model=actor_model, rollout_manager=rollout_manager)
    rollout_manager.shut_down(timeout_s=10.0)
    actor_model.shut_down()
    ray_session.util.remove_placement_group(pgs["actor"][0])


def test_places_are_apart_and_as_many_as_asked(system: Any) -> None:
    (actor_pg, actor_indices), (rollout_pg, rollout_indices) = system.pgs["actor"], system.pgs["rollout"]
    assert actor_pg.id == rollout_pg.id
    assert sorted([*actor_indices, *rollout_indices]) == [0, 1, 2, 3]
    assert (len(actor_indices), len(rollout_indices)) == (2, 2)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or "LD_PRELOAD" in os.environ,
    reason="learners keep the allocator that they would have",
)
def test_learners_allocate_with_jemalloc(ray_session: Any, system: Any) -> None:
    asked = [
        learner.__ray_call__.remote(lambda _: Path("/proc/self/maps").read_text())
        for learner in system.actor_model.workers
    ]
    assert all("libjemalloc" in mapped for mapped in ray_session.get(asked, timeout=TIMEOUT_S))


def test_the_documents_loop_trains(ray_session: Any, system: Any) -> None:
    ray, args, actor_model, rollout_manager = ray_session, system.args, system.actor_model, system.rollout_manager

    start_rollout_ids = ray.get(
        actor_model.async_init(args, role="actor", with_ref=args.kl_coef != 0 or args.use_kl_loss)
    )
    assert start_rollout_ids == [0, 0]
    ray.get(actor_model.async_init_weight_update_connections(rollout_manager), timeout=TIMEOUT_S)
    ray.get(actor_model.async_update_weights())
    assert ray.get(rollout_manager.async_eval(0), timeout=TIMEOUT_S) is None
    before = ray.get(rollout_manager.controller.take_evaluation.remote(), timeout=TIMEOUT_S)
    assert 0 <= before["eval/pass_at_1"] <= 1
    assert list(
        Path(args.output_dir).glob("wandb/*run-*documents-loop")
    )  # where evaluations are logged, without a key offline

    for rollout_id in range(start_rollout_ids[0], 3):
        rollout_data_ref = ray.get(rollout_manager.async_generate(rollout_id))
        assert isinstance(rollout_data_ref, Box)
        looked_at = ray.get(actor_model.async_eval(rollout_id, rollout_data_ref), timeout=TIMEOUT_S)
        trained = ray.get(actor_model.async_train(rollout_id, rollout_data_ref))
        assert [report["num_tokens"] for report in looked_at] == [report["num_tokens"] for report in trained]
        for report in trained:  # the engines sampled with the very weights that were trained
            assert max(one["max"] for one in report["mismatches"]) < 1e-3
        batch = ray.get(rollout_data_ref.inner, timeout=TIMEOUT_S)
        assert batch.training_step == rollout_id + 1
        assert batch.metrics["max_sample_age"] == 0
        ray.get(actor_model.async_update_weights())

    counts = ray.get(rollout_manager.controller.close_ledger.remote(), timeout=TIMEOUT_S)
    assert counts["issued"] == counts["consumed"] + sum(counts["dropped"].values())
    assert counts["consumed"] == 2 * args.num_unique_prompts_rollout  # the third is not known to be trained
    reports = ray.get(actor_model.async_update_weights(), timeout=TIMEOUT_S)
    assert reports[0].confirmed == {0: 3, 1: 3}


def test_memory_is_released_and_taken_back_by_tag(ray_session: Any, system: Any) -> None:
    ray, actor_model, rollout_manager = ray_session, system.actor_model, system.rollout_manager
    engine = rollout_manager.rollout_engines[0]
    assert all(released >= 0 for released in ray.get(rollout_manager.async_offload(), timeout=TIMEOUT_S))
    assert ray.get(engine.take_inventory.remote(), timeout=TIMEOUT_S)["state"] == "asleep"
    ray.get(rollout_manager.async_onload(["weights"]), timeout=TIMEOUT_S)
    ray.get(actor_model.async_update_weights(), timeout=TIMEOUT_S)
    assert ray.get(engine.take_inventory.remote(), timeout=TIMEOUT_S)["state"] == "asleep"  # no key-value cache yet
    assert all(released >= 0 for released in ray.get(actor_model.async_offload(), timeout=TIMEOUT_S))
    with pytest.raises(ray.exceptions.RayTaskError, match="needs weights on the device"):
        ray.get(actor_model.async_update_weights(), timeout=TIMEOUT_S)
    ray.get(rollout_manager.async_onload(["kv_cache"]), timeout=TIMEOUT_S)
    assert ray.get(engine.take_inventory.remote(), timeout=TIMEOUT_S)["state"] == "serving"
    ray.get(actor_model.async_onload(), timeout=TIMEOUT_S)


def test_save_model_with_the_optimizer(ray_session: Any, system: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    ray_session.get(system.actor_model.async_save_model(3), timeout=TIMEOUT_S)
    directory = f"{system.args.output_dir}/step_000003"
    AutoModelForCausalLM.from_pretrained(directory)
    ray_session.get(system.actor_model.async_load_checkpoint(f"{directory}/checkpoint", 3), timeout=TIMEOUT_S)


class ProcessOnAPlace:
    """In place of a learner, which would import torch and DeepSpeed for the number of its process."""

    def __init__(self, rank: int, world_size: int) -> None:
        assert rank < world_size == 3


def test_a_group_without_a_placement_group_makes_its_own(ray_session: Any) -> None:
    from open_instruct.learners.actor_group import RayTrainGroup

    ray_session.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    actor_cls: Any = ProcessOnAPlace
    group = RayTrainGroup(num_nodes=2, num_gpus_per_node=[2, 1], actor_cls=actor_cls)
    pids = ray_session.get(
        [worker.__ray_call__.remote(lambda _: os.getpid()) for worker in group.workers], timeout=TIMEOUT_S
    )
    assert len(set(pids)) == 3
    group.shut_down()


@pytest.mark.parametrize(
    ("num_nodes", "per_node"), [(2, [1]), (1, 0), (1, [0])], ids=["too few entries", "none", "none in a list"]
)
def test_a_node_without_learners_is_a_mistake(num_nodes: int, per_node: int | list[int]) -> None:
    from open_instruct.learners.actor_group import RayTrainGroup

    with pytest.raises(ValueError, match="give 1 or more for each node"):
        RayTrainGroup(num_nodes, per_node)


def test_too_much_is_told_at_once_with_the_numbers(ray_session: Any) -> None:
    import time

    from open_instruct.cluster.placement_plan import CannotPlace
    from open_instruct.run.placement_group import create_placement_groups

    started = time.monotonic()
    with pytest.raises(CannotPlace) as told:
        create_placement_groups(make_args(num_learners_per_node=[40], vllm_num_engines=50))
    assert time.monotonic() - started < 5
    text = str(told.value)
    assert "no node has room for 40 learners" in text
    assert "40 learners and 50 engines of 1 place: 18 CPU" in text
    assert "of 2 CPU free" in text


def test_what_others_hold_is_waited_for_and_then_told(ray_session: Any) -> None:
    import time

    from ray.util.placement_group import placement_group, remove_placement_group

    from open_instruct.cluster.placement_plan import CannotPlace
    from open_instruct.run.placement_group import create_placement_groups

    time.sleep(2.0)  # what earlier tests held is given back meanwhile
    free = ray_session.available_resources()["CPU"]
    others = placement_group([{"CPU": free - 0.1}])
    assert others.wait(timeout_seconds=30)
    started = time.monotonic()
    with pytest.raises(CannotPlace, match=r"no room after 2 s: .*Nodes: .* 0\.1\d* of 2 CPU free"):
        create_placement_groups(make_args(placement_timeout_s=2.0))
    assert 2 <= time.monotonic() - started < 10
    remove_placement_group(others)
