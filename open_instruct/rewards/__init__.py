"""Reward functions as TRL's GRPOTrainer takes them: `f(prompts, completions, **columns) -> list[float | None]`."""
