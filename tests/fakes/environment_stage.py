"""Environments in their real processes, without a conversation."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.environments.base import (
    EnvironmentSpec,
    Message,
    Observation,
    Opening,
    ToolCall,
    ToolError,
    Turn,
    tool_message,
)
from open_instruct.environments.processes import EnvironmentPool

DEADLINE_S = 60.0


@dataclass
class Episode:
    """What an environment said."""

    opening: Opening
    observations: list[Observation] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The answers, messages to one turn as lines of one text."""
        return ["\n".join(str(message["content"]) for message in one.messages) for one in self.observations]

    @property
    def rewards(self) -> list[float | None]:
        return [one.reward for one in self.observations]


Say = Turn | Callable[[Sequence[Message]], Turn]
"""A turn, or what makes one from the messages so far."""


class EnvironmentStage:
    """A pool, and an event loop for it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.pool = EnvironmentPool(4)

    def play(
        self,
        target: str,
        *turns: Say,
        task: dict[str, Any] | None = None,
        seed: int = 7,
        deadline_s: float = DEADLINE_S,
        **config: Any,
    ) -> Episode:
        """One episode. Of further turns after its end none is taken. Of a tool without a state, nothing but the answers."""
        return self._runner.run(self._play(target, turns, task or {}, seed, deadline_s, config))

    async def _play(
        self,
        target: str,
        turns: Sequence[Say],
        task: dict[str, Any],
        seed: int,
        deadline_s: float,
        config: dict[str, Any],
    ) -> Episode:
        lease = await self.pool.lease(EnvironmentSpec(target, "it", config), deadline_s)
        try:
            told = {"messages": [{"role": "user", "content": "Go."}], "ground_truth": "46", **task}
            opening = Opening() if lease.is_stateless else await lease.reset(told, seed, deadline_s)
            episode, messages = Episode(opening), list(opening.messages)
            for say in turns:
                turn = say if isinstance(say, Turn) else say(messages)
                try:
                    said = await lease.step(turn, deadline_s)
                except ToolError as error:
                    said = Observation([tool_message("it", str(error))], num_errors=1)
                episode.observations.append(said)
                messages += said.messages
                if said.done:
                    break
            if not lease.is_stateless:
                ending = await lease.finish(deadline_s)
                episode.reward, episode.metrics = ending.reward, dict(ending.metrics)
            return episode
        finally:
            await self.pool.give_back(lease)

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine, in the stage's loop."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        self.pool.close()
        self._runner.close()


def call(name: str, **arguments: Any) -> Turn:
    return Turn("", (ToolCall(name, arguments),))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: "subprocess.Popen[bytes]", limit_s: float = 60.0) -> None:
    """Until the process listens on the port."""
    deadline = time.monotonic() + limit_s
    while True:
        assert process.poll() is None, "the server has ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)
