"""The options of agent programs, and what is wrong with them."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from open_instruct.option_limits import COUNT, POSITIVE, limited
from open_instruct.option_text import shown
from open_instruct.registry import NO_FLAG
from open_instruct.workflows.conversations.tool_parsers import OWN_TURN, VLLM

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig

AGENT_PROGRAM = "agent_program"


@dataclass(kw_only=True)
class AgentOptions:
    """Agent programs"""

    agent_command: str | None = None
    """With rollout_workflow agent_program: the program that every rollout starts, such as "python my_agent.py". It finds the
    model in OPENAI_BASE_URL and the row on its standard input (docs/guides/agents.md)."""
    agent_timeout_s: float = limited(600.0, POSITIVE)
    """Longest time that a program may run. Then it is killed with its children, which counts as a failure of the program."""
    agent_attempts: int = limited(2, COUNT)
    """How often a rollout is begun whose program fails. After that its prompt is sampled again with another seed,
    max_generation_attempts times in all."""
    agent_max_concurrent: int | None = limited(None, COUNT)
    """Most programs at once on an engine; further rollouts wait. By default as many as the engine has rollouts."""
    agent_max_samples: int = limited(8, COUNT)
    """Most samples of one rollout. Requests that do not go on where an earlier one ended begin a further sample."""
    agent_prints_reward: bool = False
    """Programs print their reward as the last line: {"reward": 1.0}. One that ends without such a line has failed. Without this
    option such a line may be there or not."""
    agent_gets_ground_truth: bool = False
    """Give programs the row's ground truth, so that they can compute a reward."""
    agent_tool_parser_type: str = "legacy"
    """How the model writes calls of the tools that a program gives to /v1/chat/completions: legacy, dr_tulu or vllm_NAME, as for
    tool_parser_type."""
    agent_directory: str = field(default="", metadata=NO_FLAG)
    """Where programs run: where the driver was started, which fills it in."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.agent_command or "")


def search_path() -> str:
    """PATH of the programs: `python` is the interpreter of the run."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def mistakes(args: "GRPOConfig") -> Iterator[str]:
    """Wrong options of agent programs."""
    try:
        words = shlex.split(args.agent_command or "")
    except ValueError as error:
        yield f"{shown(args, 'agent_command')}: it is no command line ({error})."
        return
    if not words:
        yield (
            f"{shown(args, 'rollout_workflow', 'agent_command')}: there is no program to start. Give one, such as "
            '--agent_command "python my_agent.py".'
        )
    elif shutil.which(words[0], path=search_path()) is None:
        yield f"{shown(args, 'agent_command')}: there is no program {words[0]}. Give one that can be run here."
    elif len(words) > 1 and words[1].endswith(".py"):
        script = os.path.join(args.agent_directory or "", words[1])
        if not os.path.isfile(script):
            yield f"{shown(args, 'agent_command')}: there is no file {script}. Give the path of one."
    kind = args.agent_tool_parser_type
    if kind not in OWN_TURN and not kind.startswith(VLLM):
        yield f"{shown(args, 'agent_tool_parser_type')}: it must be legacy, dr_tulu or vllm_ and the name of a parser of vLLM."
