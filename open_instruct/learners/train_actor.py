"""What a training actor can do, whichever library trains in it. `PolicyTrainerRayProcess` does it with DeepSpeed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class TrainRayActor(ABC):
    """One rank of a group of training actors: all that `RayTrainGroup` and the run ask of it.

    All ranks are called together: most of these methods are collective. `rollout_id` counts training steps that are done: the
    data of rollout 4 is trained in step 5.
    """

    @abstractmethod
    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """On the first rank: listen for the others, for `timeout_s` seconds; host and port where they find it."""

    @abstractmethod
    def init(self, args: Any, device: Any, address: tuple[str, int], *, role: str, with_ref: bool) -> int:
        """Join the other ranks at `address` and load the model, with a reference model if asked; the first `rollout_id`."""

    @abstractmethod
    def connect_rollout_engines(self, rollout_engines: Mapping[int, Any], rollout_engine_lock: Any) -> dict[int, str]:
        """Set up the transport of weights to these engines (with their positions), in place of an earlier one; who could not be
        reached, with the cause."""

    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any) -> dict[str, Any] | None:
        """One training step, or a partial batch of it; sums for `merge_step_metrics` once the step is complete."""

    @abstractmethod
    def eval(self, rollout_id: int, rollout_data_ref: Any) -> dict[str, Any]:
        """The sums of `train`, without a step."""

    @abstractmethod
    def update_weights(self, version: int | None = None, engines: Sequence[int] | None = None) -> Any:
        """Send the weights to the engines; what became of it, on the first rank."""

    @abstractmethod
    def held_version(self) -> int:
        """The version of the weights: training steps that are in them."""

    @abstractmethod
    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """(R,) float32 log-probs of each response (R tokens) after its prompt; the same on every rank."""

    @abstractmethod
    def save_model(self, iteration: int, with_optimizer: bool = True, *, directory: str | None = None) -> None:
        """Write the model, and with the optimizer all that training needs to go on."""

    @abstractmethod
    def save_checkpoint(self, directory: str) -> dict[str, int]:
        """Write what training needs to go on, under `directory`; the bytes of each file of this rank, by relative path."""

    @abstractmethod
    def load_checkpoint(self, directory: str, version: int) -> None:
        """Go on from what `save_checkpoint` wrote after `version` training steps."""

    @abstractmethod
    def sleep(self, tags: Sequence[str] | None = None) -> int:
        """Move states off the device; the bytes that this gave back."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring them back."""
