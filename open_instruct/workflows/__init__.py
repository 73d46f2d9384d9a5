"""What becomes of a prompt: rollouts as coroutines that see a context and nothing else."""
