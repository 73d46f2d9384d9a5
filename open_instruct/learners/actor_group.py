"""The driver's handle on all learners."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import ray

from open_instruct.cluster import bundles
from open_instruct.cluster.bundles import Bundles
from open_instruct.cluster.placement_plan import Asked
from open_instruct.config.grpo_config import config_of
from open_instruct.data_types import Box, RolloutBatch
from open_instruct.device import Device, allocator_env, current_device
from open_instruct.learners.train_actor import POLICY, TrainRayActor

if TYPE_CHECKING:
    import numpy as np
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

PLACEMENT_S = 50.0
"""How long a group that makes its own placement group waits for free resources."""


class RayTrainGroup:
    """A group of learners, one per place. Functions that start with `async_` return a list of object refs, one per rank.

    Args:
        num_nodes: number of nodes that the learners run on.
        num_gpus_per_node: places on each node (GPUs, or on CPU shares of a core); a list where nodes differ.
        pg: where the learners are placed: a placement group, or a placement group with the indices of the bundles to use, rank
            by rank. None reserves a placement group for these learners only.
        num_gpus_per_actor: share of its place that a learner takes. Below 1, other actors can share the place.
        device: the device that the learners compute on; None is the device that this process sees.
        actor_cls: the class of a learner; None is `PolicyTrainerRayProcess`.
    """

    def __init__(
        self,
        num_nodes: int,
        num_gpus_per_node: int | Sequence[int],
        pg: "Bundles | PlacementGroup | None" = None,
        num_gpus_per_actor: float = 1.0,
        *,
        device: Device | None = None,
        actor_cls: type[TrainRayActor] | None = None,
    ) -> None:
        device = device or current_device()
        per_node = (
            list(repeat(num_gpus_per_node, num_nodes)) if isinstance(num_gpus_per_node, int) else num_gpus_per_node
        )
        if len(per_node) != num_nodes or min(per_node, default=0) < 1:
            raise ValueError(
                f"num_nodes {num_nodes}, num_gpus_per_node {num_gpus_per_node}: give 1 or more for each node."
            )
        self._own_group: PlacementGroup | None = None
        if pg is None:
            request = Asked(tuple(per_node), 0, 1, device.place_resources, device.places_per_core)
            reservation = bundles.reserve(request, timeout_s=PLACEMENT_S)
            self._own_group = reservation.group
            pg = reservation.group, reservation.actor
        placed, world_size = bundles.as_bundles(pg), sum(per_node)
        if len(placed[1]) < world_size:
            raise ValueError(
                f"{world_size} learners, and the placement group has {len(placed[1])} bundles. Give a larger one."
            )
        actor = ray.remote(actor_cls or _deepspeed_learner())
        share, env = num_gpus_per_actor, allocator_env(device)
        self.workers: list[ActorHandle] = [
            actor.options(**bundles.actor_options(device, placed, rank, share=share, env=env)).remote(rank, world_size)
            for rank in range(world_size)
        ]

    def async_init(self, args: Any, role: str = POLICY, with_ref: bool = False) -> list:
        """Make the learners connect to each other and load the model; each ref gives the `rollout_id` to begin with."""
        args = config_of(args)
        address = self.workers[0].open_rendezvous.remote(60.0 * args.backend_timeout)
        return self._all("init", args, args.device, address, role=role, with_ref=with_ref)

    def async_init_weight_update_connections(
        self, rollout: Any, engines: "Mapping[int, ActorHandle] | None" = None
    ) -> list:
        """Connect the learners with the engines of a `RolloutManager`; if `engines` (by position) is given, only with these."""
        if engines is None:
            engines = dict(enumerate(rollout.rollout_engines))
        return self._all("connect_rollout_engines", engines, rollout.rollout_engine_lock)

    def async_train(self, rollout_id: int, rollout_data_ref: Box | RolloutBatch) -> list:
        """Train on the data of a rollout: a whole step, or a partial batch of it."""
        return self._all("train", rollout_id, rollout_data_ref)

    def async_eval(self, rollout_id: int, rollout_data_ref: Box | RolloutBatch) -> list:
        """Each ref gives what `async_train` would report, without a training step."""
        return self._all("eval", rollout_id, rollout_data_ref)

    def async_held_version(self) -> list:
        """Each ref gives the version of one learner's weights, once that learner has finished its earlier calls."""
        return self._all("held_version")

    def async_update_weights(self, version: int | None = None, engines: Sequence[int] | None = None) -> list:
        """Send the weights to the connected engines; the first ref gives the `UpdateReport`."""
        return self._all("update_weights", version, engines)

    def async_score(self, sequences: "Sequence[tuple[np.ndarray, np.ndarray]]") -> list:
        """Log-probs of responses to prompts; each ref gives the log-probs of all responses."""
        return self._all("score", sequences)

    def async_save_model(self, step_id: int, *, directory: str | None = None, with_optimizer: bool = True) -> list:
        return self._all("save_model", step_id, with_optimizer, directory=directory)

    def async_save_checkpoint(self, directory: str) -> list:
        return self._all("save_checkpoint", directory)

    def async_load_checkpoint(self, directory: str, version: int) -> list:
        return self._all("load_checkpoint", directory, version)

    def async_offload(self, tags: Sequence[str] | None = None) -> list:
        """Make the learners release memory of their devices; each ref gives the bytes released."""
        return self._all("sleep", tags)

    def async_onload(self, tags: Sequence[str] | None = None) -> list:
        return self._all("wake_up", tags)

    def shut_down(self) -> None:
        """End the learners, and release the bundles that this group reserved for itself."""
        for worker in self.workers:
            ray.kill(worker)
        if self._own_group is not None:
            ray.util.remove_placement_group(self._own_group)

    def _all(self, method: str, *args: object, **kwargs: object) -> list:
        return [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]


def _deepspeed_learner() -> type[TrainRayActor]:
    """The default class of a learner. It is imported here, because its module imports torch, and wrong options are to be reported
    without waiting for torch."""
    from open_instruct.learners.learner import PolicyTrainerRayProcess

    return PolicyTrainerRayProcess
