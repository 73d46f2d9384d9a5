"""Registers the workflows that come with the package."""

from open_instruct.workflows import single_turn
from open_instruct.workflows.agents import workflow as agent_workflow
from open_instruct.workflows.conversations import workflow as conversation_workflow
from open_instruct.workflows.rc import workflow as rc_workflow

__all__ = ["agent_workflow", "conversation_workflow", "rc_workflow", "single_turn"]
