"""A name for users: run files say `open_instruct.rc_policies.generate_math_rollout`."""

from open_instruct.workflows.rc.policies import generate_math_rollout, to_training_text

__all__ = ["generate_math_rollout", "to_training_text"]
