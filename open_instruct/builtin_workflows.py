"""Registers the workflows that come with the package."""

from open_instruct import rc_workflow, single_turn

__all__ = ["rc_workflow", "single_turn"]
