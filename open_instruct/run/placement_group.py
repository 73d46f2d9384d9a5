"""Puts learners and engines on a cluster: first reserves places for both, then starts the actors on these places.

    pgs = create_placement_groups(args)
    actor_model = create_actor_group(args, pgs["actor"], wandb_run_id)
    rollout_manager = create_rollout_manager(args, pgs["rollout"], wandb_run_id)

`args` are the options of a run: a `GRPOConfig`, or any namespace with the same fields.
"""

from collections.abc import Callable
from typing import Any

from open_instruct.cluster import bundles
from open_instruct.cluster.bundles import Bundles
from open_instruct.cluster.placement_plan import Asked
from open_instruct.config.grpo_config import GRPOConfig, config_of
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.run.rollout_manager import COLOCATED_SHARE, RolloutManager


def create_placement_groups(args: Any, *, on_poll: Callable[[], None] = lambda: None) -> dict[str, Bundles]:
    """Reserve a place for every learner and every worker of an engine. While there is no room, `on_poll` is called now and then.

    Returns `(pg, reordered_bundle_indices)` for each of the roles `actor` and `rollout`.

    The indices of a role are in the order of (node address, device number), so that neighbouring ranks, and the workers of one
    engine, are neighbours in hardware. With `colocate` both roles have the same bundles.

    Raises:
        CannotPlace: at once if the cluster is too small, or after `placement_timeout_s` if other programs occupy it. The message
            gives the numbers.
    """
    args = config_of(args)
    reservation = bundles.reserve(
        places_asked(args), timeout_s=args.placement_timeout_s, probe_s=args.init_timeout_s, on_poll=on_poll
    )
    return {
        "actor": (reservation.group, reservation.actor),
        "rollout": (reservation.group, reservation.rollout),
    }


def places_asked(args: GRPOConfig) -> Asked:
    """The places that the options ask for."""
    device = args.device
    return Asked(
        learners_per_node=tuple(args.num_learners_per_node),
        num_engines=args.vllm_num_engines,
        places_per_engine=args.vllm_tensor_parallel_size,
        place=device.place_resources,
        places_per_core=device.places_per_core,
        colocate=args.shares_devices,
    )


def create_actor_group(args: Any, pg: Bundles, wandb_run_id: str | None) -> RayTrainGroup:
    """The learners, on their bundles. `wandb_run_id` has no effect, because learners report to the driver, and the driver logs
    to wandb."""
    del wandb_run_id
    args = config_of(args)
    return RayTrainGroup(
        len(args.num_learners_per_node),
        args.num_learners_per_node,
        pg,
        COLOCATED_SHARE if args.shares_devices else 1.0,
        device=args.device,
    )


def create_rollout_manager(args: Any, pg: Bundles, wandb_run_id: str | None, **parts: Any) -> RolloutManager:
    """The controller and the engines, which are still starting on return. `parts` are further arguments of `RolloutManager`."""
    return RolloutManager(args, pg, wandb_run_id, **parts)
