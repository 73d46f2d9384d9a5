"""What a conversation asks of its environments. `environment_server.py` is the engine's side.

A conversation gets all environments that it keeps at once, before anything is said, and has a tool without a state for each call
alone, so it keeps nothing while its model speaks but what has a state. `environments/slots.py` says why.
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
"""The tool of the context through which all environments are reached."""
SLACK_S = 10.0
"""Beside an environment's own deadline: the time in which the pool notices and kills it."""
FINISH_SLACK_S = CLOSE_S + SLACK_S
"""The same where the environment may also be closed. One that closes slowly has its reward all the same."""


@dataclass(frozen=True)
class Participant:
    """A tool or environment that takes part in a conversation."""

    spec: EnvironmentSpec
    schemas: Sequence[Schema]
    own_names: Mapping[str, str]
    """By the name under which the model calls a function: the name that the tool itself has for it."""
    takes_text: bool = False
    task: Mapping[str, Any] | None = None
    """What the row says of it; None for a tool without a state."""

    @property
    def is_kept(self) -> bool:
        """Whether the conversation keeps it from beginning to end. A tool without a state has a process for each call alone."""
        return self.task is not None


@dataclass(frozen=True)
class Said:
    """What an environment has answered to a turn."""

    observation: Observation
    seconds: float
    wait_s: float
    """Seconds before that, until there was a place in the pool."""
    was_restored: bool
    """Whether its process had failed, and a fresh one went on from the last state."""


class EnvironmentClient:
    """The environments of one attempt at a conversation.

    Args:
        number: of the conversation among those about its prompt.
        key: tells the attempt from all others on the engine.
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
        """Make and reset all environments that are kept. Returns what they say first, and the seconds until they had places.

        Args:
            messages: of the row.
            left_s: seconds that the conversation may still take. A place may come late; the environments' own deadlines are the
                engine's business.
        """
        if not self._kept:
            return [], 0.0
        environments = [
            {
                "key": self._key_of(one),
                "spec": asdict(one.spec),
                "task": {"messages": list(messages), **(one.task or {})},
            }
            for one in self._kept
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
            timeout_s = 2 * (limit_s + reset_s) + SLACK_S  # to restore one, it is made, loaded and asked again
        else:
            request |= {"do": "call", "spec": asdict(participant.spec), "keeps_others": bool(self.leased)}
            timeout_s = left_s + reset_s + limit_s + FINISH_SLACK_S
        answer = await self._ask(participant.spec.name, request, timeout_s)
        observation = observation_from_json(answer["observation"])
        return Said(observation, answer["seconds"], answer["wait_s"], answer["was_restored"])

    async def finish(self, participant: Participant) -> Ending:
        """The end of one that is leased."""
        self.leased.remove(participant)
        request = {"do": "finish", "key": self._key_of(participant)}
        timeout_s = self._options.environment_step_timeout_s + FINISH_SLACK_S
        answer = await self._ask(participant.spec.name, request, timeout_s)
        return ending_from_json(answer["ending"])

    async def release(self) -> None:
        """Give those up that are still leased."""
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
