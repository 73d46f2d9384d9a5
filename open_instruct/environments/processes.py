"""The engine's side of environments: a pool of processes, each of which is leased for one conversation, or one call, at a time.

    conversation ── lease ──► pool ── asks ──► fork server: has loaded the code, forks ──► the environment's process
         └──────── reset, step, finish, close: JSON over a socket of its own ─────────────────┘

A process that is late, ends, or answers nonsense is killed with everything that it has started (`system/cells/reaper.py`), and
the request to it raises `EnvironmentFailed`. A process is used again only if its environment has no state. All of this runs in
the event loop of the engine's rollouts.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from open_instruct.environments.base import Ending, EnvironmentSpec, Observation, Opening, ToolError, Turn
from open_instruct.environments.fork_server import FAILED, LONGEST_ERROR
from open_instruct.environments.wire import (
    MODEL,
    MOST_BYTES,
    ending_from_json,
    observation_from_json,
    opening_from_json,
    turn_to_json,
)
from open_instruct.system.cells.framing import BadMessage, packed, receive_async, unpacked
from open_instruct.system.cells.places import Places
from open_instruct.system.sandbox import environment

logger = logging.getLogger(__name__)

START_S = 120.0
"""Longest time that the fork server may take to load the code of the environments."""
CLOSE_S = 5.0
"""Longest time that an environment may take to close before it is killed."""
MOST_USES = 256
"""Calls that a reusable process serves before a fresh process replaces it."""


class EnvironmentFailed(RuntimeError):
    """An environment failed through no fault of the model. The message begins with the environment's name."""


class Lease:
    """One environment in its process, for one conversation."""

    def __init__(self, spec: EnvironmentSpec, connection: socket.socket, process: int, pid: int) -> None:
        self.spec = spec
        self.num_uses = 0
        self.is_alive = True
        self.is_stateless = False
        self.state: Any = None
        """The last `Environment.dump` of the episode; None if there is none."""
        self._connection = connection
        self._process = process
        """File descriptor (pidfd) of the process. Unlike a process id, it never comes to mean another process."""
        self._pid = pid

    def has_ended(self) -> bool:
        """Whether the process has ended, or has sent something without a request."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
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
        """Kill the process and its group. May be called twice. The fork server kills processes that have left the group, or have
        outlived a process that ended by itself."""
        if not self.is_alive:
            return
        self.is_alive = False
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._process, 0)  # the number still means this process, so its group is its own
            os.killpg(self._pid, signal.SIGKILL)
        os.close(self._process)
        self._connection.close()

    async def _ask(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The environment's answer. Any failure ends the process, because its state is then unknown."""
        phase = message["do"]
        if not self.is_alive:
            raise EnvironmentFailed(f"{self.spec.name}: its process has ended")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_sendall(self._connection, packed(message))
                reply = await receive(self._connection)
        except TimeoutError:
            self.kill()
            raise EnvironmentFailed(f"{self.spec.name}: {phase} took longer than {deadline_s:g} s") from None
        except (OSError, BadMessage, EOFError) as error:
            self.kill()
            raise EnvironmentFailed(f"{self.spec.name}: {phase}: {error or 'its process ended'}") from error
        except BaseException:  # a cancelled conversation leaves an answer, which the next request must not read
            self.kill()
            raise
        if "error" not in reply:
            self.state = reply.get("state", self.state)
            answer = reply.get("answer")
            return answer if isinstance(answer, dict) else {}
        if reply.get("fault") == MODEL:
            raise ToolError(str(reply["error"]))
        self.kill()
        raise EnvironmentFailed(f"{self.spec.name}: {phase}: {str(reply['error'])[:LONGEST_ERROR]}")


async def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive one message. Raises `EOFError`, `OSError` or `BadMessage`."""
    loop = asyncio.get_running_loop()
    return unpacked(await receive_async(lambda size: loop.sock_recv(connection, size), MOST_BYTES))


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
        self._asking = asyncio.Lock()
        self._fork_servers: dict[bool, _ForkServer] = {}
        """Fork servers by whether their environments run programs. If so, the processes do not inherit all variables."""
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
        for fork_server in self._fork_servers.values():
            fork_server.end()

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
        async with self._asking:
            for attempt in (1, 2):
                is_bare = spec.target in self._run_programs
                if is_bare not in self._fork_servers:
                    targets = [target for target in self._targets if (target in self._run_programs) == is_bare]
                    modules = [] if is_bare else self._modules
                    variables = environment({}) if is_bare else dict(os.environ)
                    self._fork_servers[is_bare] = _ForkServer(modules, targets, variables)
                try:
                    return await self._fork_servers[is_bare].fork(spec)
                except (OSError, EOFError, TimeoutError, BadMessage) as error:
                    await asyncio.to_thread(self._fork_servers.pop(is_bare).end)
                    if attempt == 2:
                        why = str(error) or f"its code took longer than {START_S:g} s to load"
                        raise EnvironmentFailed(f"{spec.name}: no process could be started: {why}") from error
                    logger.warning("the process that starts environments failed and is started again: %s", error)
        raise AssertionError("the second attempt returns or raises")


class _ForkServer:
    """The engine's handle on the process that forks the environments' processes."""

    def __init__(self, modules: Sequence[str], targets: Sequence[str], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._is_ready = False
        arguments = [str(theirs.fileno()), str(len(modules)), *modules, *targets]
        paths = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "open_instruct.environments.fork_server", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # some libraries print on import
                env={**variables, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )

    async def fork(self, spec: EnvironmentSpec) -> Lease:
        """A fresh process. Raises `OSError`, `EOFError`, `TimeoutError` or `BadMessage`."""
        await self._wait_until_ready()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            request = packed({"target": spec.target, "config": spec.config})
            with theirs:
                if socket.send_fds(self._socket, [request], [theirs.fileno()]) < len(request):
                    raise OSError("its arguments are too long")
            async with asyncio.timeout(START_S):  # the first environment of a kind also waits for its code to load
                pid = (await receive(ours)).get("pid")
            if type(pid) is not int:
                raise BadMessage("no process id")
            process = os.pidfd_open(pid)
        except ProcessLookupError:  # the process ended and was reaped; the fork server works
            ours.close()
            raise EnvironmentFailed(f"{spec.name}: its process ended at once") from None
        except BaseException:
            ours.close()
            raise
        return Lease(spec, ours, process, pid)

    async def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        async with asyncio.timeout(START_S):
            answer = await asyncio.get_running_loop().sock_recv(self._socket, 1 + LONGEST_ERROR)
        if answer[:1] == FAILED or not answer:
            raise OSError(answer[1:].decode(errors="replace") or "it ended; its standard error says why")
        self._is_ready = True

    def end(self) -> None:
        """Have the fork server kill the processes that it has forked, and all that these have started, and end."""
        if not self._is_ready:  # it has forked nothing yet, and may go on loading for a long time
            self._process.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        if self._process.returncode is None:
            self._process.kill()  # the kernel then kills the processes that it forked
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
