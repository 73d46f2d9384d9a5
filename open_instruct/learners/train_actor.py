"""The interface of a training actor, whichever library it trains with. `PolicyTrainerRayProcess` implements it with DeepSpeed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

POLICY = "actor"
"""The role of the model that is trained, as the document of the Ray integration calls it."""


class TrainRayActor(ABC):
    """One rank of a group of training actors, with all methods that `RayTrainGroup` and the run call.

    All ranks are called together, because most of these methods are collective. `rollout_id` counts training steps that are done:
    the data of rollout 4 is trained in step 5.
    """

    @abstractmethod
    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """On the first rank: listen for the other ranks, for `timeout_s` seconds. Returns the host and port to connect to."""

    @abstractmethod
    def init(self, args: Any, device: Any, address: tuple[str, int], *, role: str, with_ref: bool) -> int:
        """Join the other ranks at `address` and load the model (`with_ref`: and the reference). Returns the first
        `rollout_id`."""

    @abstractmethod
    def connect_rollout_engines(self, rollout_engines: Mapping[int, Any], rollout_engine_lock: Any) -> dict[int, str]:
        """Set up the transport of weights to these engines (by position), in place of an earlier transport. Returns the engines
        that could not be reached, with the cause."""

    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any) -> dict[str, Any] | None:
        """One training step, or a partial batch of it. Returns sums for `merge_step_metrics` once the step is complete."""

    @abstractmethod
    def eval(self, rollout_id: int, rollout_data_ref: Any) -> dict[str, Any]:
        """The sums of `train`, without a step."""

    @abstractmethod
    def update_weights(self, version: int | None = None, engines: Sequence[int] | None = None) -> Any:
        """Send the weights to the engines. Returns on the first rank the outcome of the update."""

    @abstractmethod
    def held_version(self) -> int:
        """The version of the weights: the number of training steps that are in them."""

    @abstractmethod
    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """(R,) float32 log-probs of each response (R tokens) after its prompt; the same on every rank."""

    @abstractmethod
    def save_model(self, iteration: int, with_optimizer: bool = True, *, directory: str | None = None) -> None:
        """Write the model; with `with_optimizer` also everything that training needs to go on."""

    @abstractmethod
    def save_checkpoint(self, directory: str) -> dict[str, int]:
        """Write what training needs to go on, under `directory`. Returns the bytes of this rank's files by relative path."""

    @abstractmethod
    def load_checkpoint(self, directory: str, version: int) -> None:
        """Go on from what `save_checkpoint` wrote after `version` training steps."""

    @abstractmethod
    def sleep(self, tags: Sequence[str] | None = None) -> int:
        """Move states off the device. Returns the number of bytes released."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring states back to the device."""
