"""The parts of `rc_actor.py`, the program that makes reasoning-cache rollouts on OpenAI-compatible servers."""
