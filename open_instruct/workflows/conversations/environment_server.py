"""The engine's side of the environments of conversations. Requests and answers are plain values.

lease     all environments of a conversation at once, made and reset     the conversation keeps them
step      one environment answers a turn                                 after a failure a fresh process may continue
finish    one environment's last reward; its process ends
release   the conversation is given up, and the process is killed
call      a tool without a state answers                                 it has a process only for this call
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.environments.adapters import environment_class
from open_instruct.environments.base import EnvironmentSpec, Observation, ToolError, Turn, tool_message, user_message
from open_instruct.environments.processes import EnvironmentFailed, EnvironmentPool, Lease
from open_instruct.environments.wire import (
    as_text,
    ending_to_json,
    observation_to_json,
    opening_to_json,
    turn_from_json,
)
from open_instruct.workflows.conversations.options import ConversationOptions, OfferedTool

logger = logging.getLogger(__name__)


class EnvironmentServer:
    """The environments of all conversations on one engine.

    Args:
        tools: the tools of the run, whose code is loaded first.
    """

    def __init__(self, options: ConversationOptions, tools: Sequence[OfferedTool]) -> None:
        targets = [tool.spec.target for tool in tools]
        self._pool = EnvironmentPool(
            options.num_places,
            modules=options.environment_modules,
            targets=targets,
            run_programs=[target for target in targets if environment_class(target).runs_programs],
        )
        self._reset_s = options.environment_reset_timeout_s
        self._step_s = options.environment_step_timeout_s
        self._leases: dict[str, Lease] = {}
        """Leased environments of conversations, by key."""
        self._num_failures = 0

    async def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        actions = {
            "lease": self._lease,
            "step": self._step,
            "finish": self._finish,
            "release": self._release,
            "call": self._call,
        }
        try:
            return await actions[request["do"]](request)
        except EnvironmentFailed as error:
            self._num_failures += 1
            if self._num_failures & (self._num_failures - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                logger.warning("an environment failed, the %d. failure of this engine: %s", self._num_failures, error)
            raise

    async def _lease(self, request: Mapping[str, Any]) -> dict[str, Any]:
        began, environments = time.monotonic(), request["environments"]
        specs = [EnvironmentSpec(**environment["spec"]) for environment in environments]
        leases = await self._pool.lease_all(specs, self._reset_s, and_one_more=request["has_tools"])
        wait_s = time.monotonic() - began
        openings = []
        try:
            for lease, environment in zip(leases, environments, strict=True):
                openings.append(opening_to_json(await self._reset(lease, environment["task"], request["seed"])))
        except BaseException:
            for lease in leases:
                self._pool.forget(lease)
            raise
        self._leases.update(zip((environment["key"] for environment in environments), leases, strict=True))
        return {"openings": openings, "wait_s": wait_s}

    async def _reset(self, lease: Lease, task: Mapping[str, Any], seed: int) -> Any:
        try:
            return await lease.reset(task, seed, self._reset_s)
        except ToolError as error:  # cannot be the model's fault, because the model has not spoken yet
            raise EnvironmentFailed(f"{lease.spec.name}: reset: {error}") from error

    async def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        began, turn, was_restored = time.monotonic(), turn_from_json(request["turn"]), False
        try:
            observation = await _answer(self._leases[request["key"]], turn, request["limit_s"])
        except EnvironmentFailed as error:
            observation, was_restored = await self._step_after_restoring(request, turn, error), True
        seconds = time.monotonic() - began
        return {**_said(observation, seconds), "was_restored": was_restored}

    async def _step_after_restoring(
        self, request: Mapping[str, Any], turn: Turn, error: EnvironmentFailed
    ) -> Observation:
        """Answer a turn in a fresh process that continues from the state before the turn. Raises `error` if there is no state."""
        failed = self._leases[request["key"]]
        if failed.state is None:
            raise error
        lease = self._leases[request["key"]] = await self._pool.replace(failed, self._reset_s)
        await lease.load(failed.state, self._reset_s)
        return await _answer(lease, turn, request["limit_s"])

    async def _finish(self, request: Mapping[str, Any]) -> dict[str, Any]:
        lease = self._leases.pop(request["key"])
        try:
            return {"ending": ending_to_json(await lease.finish(self._step_s))}
        finally:
            await self._pool.give_back(lease)

    async def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Give an environment up. Its process is killed, because the environment may be in any state."""
        lease = self._leases.pop(request["key"], None)
        if lease is not None:
            self._pool.forget(lease)
        return {}

    async def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        began, spec = time.monotonic(), EnvironmentSpec(**request["spec"])
        lease = await self._pool.lease(spec, self._reset_s, keeps_others=request["keeps_others"])
        leased = time.monotonic()
        try:
            observation = await _answer(lease, turn_from_json(request["turn"]), request["limit_s"])
            seconds = time.monotonic() - leased
        finally:
            await self._pool.give_back(lease)
        return {**_said(observation, seconds), "wait_s": leased - began}

    def close(self) -> None:
        self._pool.close()


async def _answer(lease: Lease, turn: Turn, limit_s: float) -> Observation:
    """The environment's answer. If the model is at fault, the answer says so."""
    try:
        return await lease.step(turn, limit_s)
    except ToolError as error:
        text = as_text(str(error))
        message = tool_message(turn.calls[0].name, text) if turn.calls else user_message(text)
        return Observation([message], num_errors=1)


def _said(observation: Observation, seconds: float) -> dict[str, Any]:
    return {"observation": observation_to_json(observation), "seconds": seconds, "wait_s": 0.0, "was_restored": False}
