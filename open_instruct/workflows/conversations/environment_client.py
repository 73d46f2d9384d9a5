"""A conversation's side of its environments. `environment_server.py` is the engine's side.

Before its first turn, a conversation gets all environments with a state at once, and keeps them to its end. It gets a tool
without a state only for the duration of one call. While its model speaks, a conversation therefore keeps only environments with a
state; `system/cells/places.py` says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from open_instruct.environments.base import Ending, EnvironmentSpec, Message, Observation, Schema, Turn
from open_instruct.environments.processes import CLOSE_S
from open_instruct.environments.wire import ending_from_json, observation_from_json, opening_from_json, turn_to_json
from open_instruct.workflows.base import Context
from open_instruct.workflows.conversations.options import ConversationOptions

ENVIRONMENT = "environment"
"""Name of the context's tool through which a conversation reaches all environments."""
SLACK_S = 10.0
"""Time after an environment's own deadline in which the pool notices the deadline and kills the environment."""
FINISH_SLACK_S = CLOSE_S + SLACK_S
"""As `SLACK_S`, for calls that may also close the environment. An environment that closes slowly keeps its reward."""


@dataclass(frozen=True)
class Participant:
    """A tool or environment that takes part in a conversation."""

    spec: EnvironmentSpec
    schemas: Sequence[Schema]
    own_names: Mapping[str, str]
    """Maps the name under which the model calls a function to the name that the tool itself uses."""
    takes_text: bool = False
    task: Mapping[str, Any] | None = None
    """What the row says about the environment; None for a tool without a state."""

    @property
    def is_kept(self) -> bool:
        """Whether the conversation keeps it to its end. A tool without a state has a process only during each call."""
        return self.task is not None


@dataclass(frozen=True)
class Said:
    """The answer of an environment to a turn."""

    observation: Observation
    seconds: float
    wait_s: float
    """Seconds that the call waited for a place in the pool. They are not part of `seconds`."""
    was_restored: bool
    """Whether the environment's process had failed, and a fresh process continued from the last state."""


class EnvironmentClient:
    """The environments of one attempt at a conversation.

    Args:
        number: number of the conversation among the conversations about its prompt.
        key: unique name of the attempt on this engine.
    """

    def __init__(
        self, ctx: Context, participants: Sequence[Participant], options: ConversationOptions, *, number: int, key: str
    ) -> None:
        self._ctx, self._options = ctx, options
        self._number, self._key = number, key
        self._kept = [participant for participant in participants if participant.is_kept]
        self._has_tools = len(self._kept) < len(participants)
        self.leased: list[Participant] = []

    async def lease(self, messages: Sequence[Message], left_s: float) -> tuple[list[Message], float]:
        """Make and reset all kept environments. Returns their opening messages, and the seconds that they waited for places.

        Args:
            messages: messages of the row.
            left_s: seconds that the conversation may still take, and so may wait for places. The engine enforces the
                environments' own deadlines.
        """
        if not self._kept:
            return [], 0.0
        environments = [
            {
                "key": self._key_of(participant),
                "spec": asdict(participant.spec),
                "task": {"messages": list(messages), **(participant.task or {})},
            }
            for participant in self._kept
        ]
        request = {"do": "lease", "environments": environments, "seed": self._ctx.seed, "has_tools": self._has_tools}
        timeout_s = left_s + 2 * len(self._kept) * self._options.environment_reset_timeout_s
        answer = await self._ask("environments", request, timeout_s)
        self.leased = list(self._kept)
        openings = [opening_from_json(opening) for opening in answer["openings"]]
        return [message for opening in openings for message in opening.messages], answer["wait_s"]

    async def step(self, participant: Participant, turn: Turn, left_s: float) -> Said:
        limit_s = min(self._options.environment_step_timeout_s, left_s)
        reset_s = self._options.environment_reset_timeout_s
        request = {"turn": turn_to_json(turn), "limit_s": limit_s}
        if participant.is_kept:
            request |= {"do": "step", "key": self._key_of(participant)}
            timeout_s = 2 * (limit_s + reset_s) + SLACK_S  # to restore it, it is made, loaded and asked again
        else:
            request |= {"do": "call", "spec": asdict(participant.spec), "keeps_others": bool(self.leased)}
            timeout_s = left_s + reset_s + limit_s + FINISH_SLACK_S
        answer = await self._ask(participant.spec.name, request, timeout_s)
        observation = observation_from_json(answer["observation"])
        return Said(observation, answer["seconds"], answer["wait_s"], answer["was_restored"])

    async def finish(self, participant: Participant) -> Ending:
        """End a leased environment, and return its last reward and metrics."""
        self.leased.remove(participant)
        request = {"do": "finish", "key": self._key_of(participant)}
        timeout_s = self._options.environment_step_timeout_s + FINISH_SLACK_S
        answer = await self._ask(participant.spec.name, request, timeout_s)
        return ending_from_json(answer["ending"])

    async def release(self) -> None:
        """Give up all environments that are still leased."""
        while self.leased:
            participant = self.leased.pop(0)
            request = {"do": "release", "key": self._key_of(participant)}
            await self._ask(participant.spec.name, request, SLACK_S)

    def _key_of(self, participant: Participant) -> str:
        return f"{self._key} {participant.spec.name}"

    async def _ask(self, name: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        effect = f"{self._number}-{name}-{request['do']}"
        answer: dict[str, Any] = await self._ctx.call(ENVIRONMENT, request, timeout_s=timeout_s, name=effect)
        return answer
