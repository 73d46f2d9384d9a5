"""A door: run files name `open_instruct.rc_policies.generate_math_rollout`."""

from open_instruct.workflows.rc.policies import generate_math_rollout, to_training_text

__all__ = ["generate_math_rollout", "to_training_text"]
