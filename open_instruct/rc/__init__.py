"""The machinery of `rc_actor.py`, the door that rolls out against OpenAI-compatible servers."""
