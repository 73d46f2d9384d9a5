"""Workflows: a rollout is a coroutine that turns a prompt into samples and acts only through its context."""
