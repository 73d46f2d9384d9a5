"""The engine's side of environments: a pool of processes, each of which is leased for one conversation, or one call, at a time.

    conversation ── lease ──► pool ── asks ──► fork server: has loaded the code, forks ──► the environment's process
         └──────── reset, step, finish, close: JSON over a socket of its own ─────────────────┘

A process that is late, ends, or answers nonsense is killed with everything that it has started (`system/cells/reaper.py`), and
the request to it raises `EnvironmentFailed`. A process is used again only if its environment has no state. All of this runs in
the event loop of the engine's rollouts.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from open_instruct.environments.base import Ending, EnvironmentSpec, Observation, Opening, ToolError, Turn
from open_instruct.environments.service import EnvironmentProcesses
from open_instruct.environments.wire import (
    MODEL,
    MOST_BYTES,
    ending_from_json,
    observation_from_json,
    opening_from_json,
    turn_to_json,
)
from open_instruct.system.cells.cells import Cell, CellEnded, Cells, UnavailableError
from open_instruct.system.cells.fork_server import LONGEST_ERROR
from open_instruct.system.cells.framing import packed
from open_instruct.system.cells.places import Places
from open_instruct.system.sandbox import environment

CLOSE_S = 5.0
"""Longest time that an environment may take to close before it is killed."""
MOST_USES = 256
"""Calls that a reusable process serves before a fresh process replaces it."""


class EnvironmentFailed(RuntimeError):
    """An environment failed through no fault of the model. The message begins with the environment's name."""


class Lease:
    """One environment in its process, for one conversation."""

    def __init__(self, spec: EnvironmentSpec, cell: Cell) -> None:
        self.spec = spec
        self.cell = cell
        self.num_uses = 0
        self.is_stateless = False
        self.state: Any = None
        """The last `Environment.dump` of the episode; None if there is none."""

    @property
    def is_alive(self) -> bool:
        return not self.cell.is_killed

    def has_ended(self) -> bool:
        """Whether the process has ended, or has sent something without a request."""
        try:
            self.cell.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def make(self, deadline_s: float) -> None:
        answer = await self._ask({"do": "make", "spec": asdict(self.spec)}, deadline_s)
        self.is_stateless = answer.get("is_stateless") is True

    async def reset(self, task: Mapping[str, Any], seed: int, deadline_s: float) -> Opening:
        return opening_from_json(await self._ask({"do": "reset", "task": task, "seed": seed}, deadline_s))

    async def step(self, turn: Turn, deadline_s: float) -> Observation:
        """Answer a turn. Raises `ToolError` if the model is at fault."""
        return observation_from_json(await self._ask({"do": "step", "turn": turn_to_json(turn)}, deadline_s))

    async def load(self, state: Any, deadline_s: float) -> None:
        """Continue from another process's `state`."""
        await self._ask({"do": "load", "state": state}, deadline_s)
        self.state = state

    async def finish(self, deadline_s: float) -> Ending:
        return ending_from_json(await self._ask({"do": "finish"}, deadline_s))

    async def close(self) -> None:
        """End the environment and its process."""
        if self.is_alive:
            with suppress(EnvironmentFailed, ToolError):
                await self._ask({"do": "close"}, CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process. May be called twice. The fork server kills what it has started."""
        self.cell.kill()

    async def _ask(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The environment's answer. Any failure ends the process, because its state is then unknown."""
        phase = message["do"]
        try:
            reply = await self.cell.ask(packed(message), deadline_s, most_bytes=MOST_BYTES)
        except TimeoutError:
            raise EnvironmentFailed(f"{self.spec.name}: {phase} took longer than {deadline_s:g} s") from None
        except CellEnded as error:
            raise EnvironmentFailed(f"{self.spec.name}: {phase}: {error}") from error
        if "error" not in reply:
            self.state = reply.get("state", self.state)
            answer = reply.get("answer")
            return answer if isinstance(answer, dict) else {}
        if reply.get("fault") == MODEL:
            raise ToolError(str(reply["error"]))
        self.kill()
        raise EnvironmentFailed(f"{self.spec.name}: {phase}: {str(reply['error'])[:LONGEST_ERROR]}")


class EnvironmentPool:
    """At most `limit` processes of environments on one engine. `Places` says in which order requests get them, and why no
    request waits for ever.

    A process that waits for its next call has no place. It is ended when its room is needed.

    Args:
        modules: files and modules to import first (`--environment_modules`).
        targets: the environments of the run, which are loaded at the start.
        run_programs: the targets that run a model's programs. Their processes inherit no keys.
    """

    def __init__(
        self,
        limit: int,
        *,
        modules: Sequence[str] = (),
        targets: Sequence[str] = (),
        run_programs: Collection[str] = ("python",),
    ) -> None:
        self._modules, self._targets = list(modules), list(targets)
        self._run_programs = frozenset(run_programs)
        self._places = Places(limit)
        self._cells: dict[bool, Cells] = {}
        """Processes by whether their environments run programs. If so, the processes do not inherit all variables."""
        self._leased: set[Lease] = set()
        self._idle: defaultdict[str, list[Lease]] = defaultdict(list)
        self.is_closed = False

    async def lease(self, spec: EnvironmentSpec, deadline_s: float, *, keeps_others: bool = False) -> Lease:
        """A process with this environment, made and not yet reset. Waits until a place is free; the wait does not count against
        the deadline.

        Args:
            keeps_others: the caller holds leases from `lease_all(…, and_one_more=True)`, and keeps them during this one.
        """
        await self._places.take(keeps_others=keeps_others)
        return await self._in_a_place(spec, deadline_s)

    async def lease_all(
        self, specs: Sequence[EnvironmentSpec], deadline_s: float, *, and_one_more: bool = False
    ) -> list[Lease]:
        """A process for each of these environments, once there is a place for all of them.

        Args:
            and_one_more: the caller will sometimes lease one more process while it keeps these.
        """
        await self._places.take(len(specs), leaves=int(and_one_more))
        leases: list[Lease] = []
        try:
            for spec in specs:
                leases.append(await self._in_a_place(spec, deadline_s))
        except BaseException:
            num_untried = len(specs) - len(leases) - 1  # the place of the failed process has already been given back
            self._places.give_back(num_untried)
            for lease in leases:
                self.forget(lease)
            raise
        return leases

    async def replace(self, lease: Lease, deadline_s: float) -> Lease:
        """A fresh process in place of a failed one. It takes over the place of the failed process, because a caller that keeps
        other places must not wait for a new one."""
        lease.kill()
        self._leased.discard(lease)
        return await self._in_a_place(lease.spec, deadline_s)

    async def give_back(self, lease: Lease) -> None:
        """End a lease. The process of a tool without a state waits for the next call; any other process ends."""
        lease.num_uses += 1
        if lease.is_alive and lease.is_stateless and lease.num_uses < MOST_USES and not self.is_closed:
            self._leased.remove(lease)
            self._idle[repr(lease.spec)].append(lease)
            self._places.give_back()
            return
        try:
            await lease.close()
        finally:
            self.forget(lease)

    def forget(self, lease: Lease) -> None:
        """Kill the process and free its place."""
        lease.kill()
        if lease in self._leased:
            self._leased.remove(lease)
            self._places.give_back()

    def close(self) -> None:
        """Kill all processes. May be called from any thread once no conversation is running."""
        self.is_closed = True
        for lease in [*self._leased, *(lease for leases in self._idle.values() for lease in leases)]:
            lease.kill()
        self._leased.clear()
        self._idle.clear()
        for cells in self._cells.values():
            cells.close()

    @property
    def num_processes(self) -> int:
        return len(self._leased) + self._num_idle

    @property
    def _num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def _in_a_place(self, spec: EnvironmentSpec, deadline_s: float) -> Lease:
        """A process in a place that was taken for it. If no process can be made, the place is given back."""
        lease = self._take_idle(repr(spec))
        if lease is not None:
            self._leased.add(lease)
            return lease
        try:
            self._make_room()
            lease = await self._fork(spec)
        except BaseException:
            self._places.give_back()
            raise
        self._leased.add(lease)
        try:
            await lease.make(deadline_s)
        except ToolError as error:
            self.forget(lease)
            raise EnvironmentFailed(f"{spec.name}: {error}") from error
        except BaseException:
            self.forget(lease)
            raise
        return lease

    def _take_idle(self, key: str) -> Lease | None:
        """An idle process of this kind, or None. An idle process that has ended meanwhile (out of memory, or its server closed
        the connection) is dropped, and does not count as a failure of the call."""
        while self._idle[key]:
            lease = self._idle[key].pop()
            if lease.is_alive and not lease.has_ended():
                return lease
            lease.kill()
        return None

    def _make_room(self) -> None:
        """End idle processes of other tools, the oldest first, until there is room for the place that was taken."""
        while self._num_idle > self._places.num_free:
            next(leases for leases in self._idle.values() if leases).pop(0).kill()

    async def _fork(self, spec: EnvironmentSpec) -> Lease:
        if self.is_closed:
            raise EnvironmentFailed(f"{spec.name}: the engine ends")
        is_bare = spec.target in self._run_programs
        try:
            if is_bare not in self._cells:
                self._cells[is_bare] = self._new_cells(is_bare=is_bare)
            return Lease(spec, await self._cells[is_bare].fork_async((spec.target, dict(spec.config))))
        except UnavailableError as error:
            raise EnvironmentFailed(f"{spec.name}: {error}") from error
        except RuntimeError as error:
            raise EnvironmentFailed(f"{spec.name}: the engine ends") from error

    def _new_cells(self, *, is_bare: bool) -> Cells:
        targets = [target for target in self._targets if (target in self._run_programs) == is_bare]
        kind = EnvironmentProcesses([] if is_bare else self._modules, targets)
        return Cells(kind, {**(environment({}) if is_bare else os.environ), "OMP_NUM_THREADS": "1"})
