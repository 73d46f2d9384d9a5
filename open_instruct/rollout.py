"""A name for users: run files say `rollout.cls: open_instruct.rollout.Rollouter`."""

from open_instruct.rollouts.controller import RolloutController, Rollouter

__all__ = ["RolloutController", "Rollouter"]
