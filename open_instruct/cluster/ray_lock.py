"""A lock for processes anywhere in a Ray cluster. It has an owner, a fair queue, and a lease that ends when its holder ends.

    lock = Lock.remote()                                     handles can be passed to actors and tasks
    ray.get(lock.acquire.remote(timeout=30))                 True, or False when the time is up
    ray.get(lock.release.remote())                           an error if the caller is not the owner
    with lock.held(timeout_s=30): ...                        acquire and release in one

    process ── Lock (handle) ── acquire, release: actor calls ──► _LockKeeper (one actor)
                    └────────── a TCP connection, open as long as the process lives ──┘

The connection is the lease. The kernel closes the connection the moment a process ends, however it ends, and sends keep-alive
probes even while the process is stopped or holds the interpreter for long. So a dead holder is noticed at once (a lost node
within `tcp.LOST_S`), and a busy holder is never taken for dead. An unfinished Ray call of the holder would reveal its death too,
but would keep an actor from ending by itself (`exit_actor` waits for the calls that the actor made).
"""

import asyncio
import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from open_instruct.system.tcp import notice_a_lost_machine

ACQUIRE_S = 120.0
"""How long `acquire` waits by default."""
REPLY_S = 30.0
"""How long the keeper may take to answer, in addition to a caller's own timeout."""
MAX_WAITING = 10_000
"""Most calls that can be open at the keeper. A call that waits for the lock is an open call."""


class Lock:
    """A handle on a lock. The handle finds out which process or task is the owner, so callers do not name themselves.

    If the caller is an actor or the driver, its process owns the lock, so one method may acquire the lock and another may release
    it. In a task the lease belongs to the handle, which the task gets as an argument, so the lease ends with the task at the
    latest.
    """

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    @staticmethod
    def remote() -> "Lock":
        return Lock.options().remote()

    @staticmethod
    def options(**ray_options: Any) -> "_Remote":
        """The same options as for any Ray actor: `Lock.options(name="broadcast").remote()`."""
        keeper_class = ray.remote(_LockKeeper).options(**{"num_cpus": 0, "max_concurrency": MAX_WAITING, **ray_options})
        return _Remote(lambda: Lock(keeper_class.remote()))

    @property
    def acquire(self) -> "_Remote":
        """`acquire.remote(timeout=…)`, in seconds: a reference to True, or to False when the time is up.

        First come, first served. A timeout of 0 takes the lock only if it is free. A process that already has the lock, or waits
        for it, gets an error.
        """
        return _Remote(self._acquire)

    @property
    def release(self) -> "_Remote":
        """`release.remote()`: a reference to None, or to an error that names the owner if the caller is not the owner."""
        return _Remote(self._release)

    @property
    def holder(self) -> "_Remote":
        """`holder.remote()`: a reference to a description of the owner, or to None."""
        return _Remote(self._keeper.holder.remote)

    @contextlib.contextmanager
    def held(self, timeout_s: float = ACQUIRE_S) -> Iterator[None]:
        """Own the lock for the length of a `with` block. Raises a `TimeoutError` that names the owner of the lock."""
        try:
            is_granted = ray.get(self._acquire(timeout_s), timeout=timeout_s + REPLY_S)
        except ray.exceptions.GetTimeoutError:
            self._line().close()  # otherwise the keeper might later grant the lock, and this process would not know
            raise
        if not is_granted:
            holder = ray.get(self._keeper.holder.remote(), timeout=REPLY_S)
            raise TimeoutError(
                f"the lock did not become free within {timeout_s:g} s; {holder or 'nobody'} holds it now"
            )
        try:
            yield
        finally:
            ray.get(self._release(), timeout=REPLY_S)

    @property
    def keeper(self) -> Any:
        """The lock's actor."""
        return self._keeper

    def shut_down(self) -> None:
        """End the lock's actor."""
        ray.kill(self._keeper)

    def _acquire(self, timeout: float = ACQUIRE_S) -> Any:
        if timeout is None or not 0 <= timeout < math.inf:
            raise ValueError(
                f"timeout={timeout}: give the seconds that acquire may wait, 0 or more; every wait has an end"
            )
        return self._keeper.acquire.remote(self._line().key, timeout)

    def _release(self) -> Any:
        return self._keeper.release.remote(self._line().key)

    def _line(self) -> "_Line":
        task_id = _current_task()
        place = (self._keeper._actor_id.hex(), task_id)
        with _lines_lock:
            line = _lines.get(place)
            if line is None or not line.is_open():
                line = _lines[place] = _Line(self._keeper)
                if task_id is not None:
                    weakref.finalize(self, _close_line, place, line)
        return line


@dataclass(frozen=True)
class _Remote:
    """Lets a function be called as `x.remote(…)`."""

    remote: Callable[..., Any]


# --- in the processes that use a lock ---------------------------------------------------------------------------------


class _Line:
    """The connection of this process (or task) to a lock's keeper, and the key by which the keeper knows it."""

    def __init__(self, keeper: Any) -> None:
        self.key = uuid.uuid4().hex
        host, port, password = ray.get(keeper.open_door.remote(), timeout=REPLY_S)
        hello = {"password": password, "key": self.key, "name": _own_name()}
        self._socket = socket.create_connection((host, port), timeout=REPLY_S)
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        if not self._socket.recv(1):
            raise ConnectionError(f"the lock's keeper at {host}:{port} does not accept this process")
        self._socket.setblocking(False)

    def is_open(self) -> bool:
        """Whether the connection is open. The keeper sends nothing more, so the only thing to read is the connection's end."""
        try:
            return bool(self._socket.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()


_lines: dict[tuple[str, str | None], _Line] = {}
"""Connections by the keeper's actor id and, in a task, the id of the task."""
_lines_lock = threading.Lock()


def _close_line(place: tuple[str, str | None], line: _Line) -> None:
    line.close()
    if _lines.get(place) is line:
        del _lines[place]


def _forget_lines_in_child() -> None:
    """Close the connections in a forked process. Otherwise it would keep its parent's leases alive after the parent's death."""
    global _lines_lock
    _lines_lock = threading.Lock()  # another thread of the parent may have held it
    for place, line in list(_lines.items()):
        _close_line(place, line)


os.register_at_fork(after_in_child=_forget_lines_in_child)


def _current_task() -> str | None:
    """Id of the task that this process runs; None in an actor or in the driver."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE or context.get_actor_id() is not None:
        return None
    return context.get_task_id()


def _own_name() -> str:
    """The name of this process, for people to read."""
    context = ray.get_runtime_context()
    where = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
    if context.worker.mode != ray.WORKER_MODE:
        return f"the driver ({where})"
    if (actor_id := context.get_actor_id()) is None:
        return f"task {context.get_task_name()} ({where})"
    return f"actor {context.get_actor_name() or actor_id} in {context.get_task_name()} ({where})"


# --- in the keeper's process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    key: str
    name: str


@dataclass(frozen=True)
class _Waiter:
    owner: _Owner
    is_granted: asyncio.Future[bool]


class _LockKeeper:
    """The actor behind the handles. It runs in one event loop, so nothing else runs between two `await`s."""

    def __init__(self) -> None:
        self._password = secrets.token_hex(16)
        """A process that connects without the password does not belong to this cluster."""
        self._door: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._owners: dict[str, _Owner] = {}
        """All processes and tasks whose connection is open, by key."""
        self._holder: _Owner | None = None
        self._queue: deque[_Waiter] = deque()

    async def open_door(self) -> tuple[str, int, str]:
        """Host, port and password of the connection."""
        host = ray.util.get_node_ip_address()
        async with self._opening:
            if self._door is None:
                self._door = await asyncio.start_server(self._keep_line, host, 0)
        return host, self._door.sockets[0].getsockname()[1], self._password

    async def _keep_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to the death of the process at its other end."""
        notice_a_lost_machine(writer.get_extra_info("socket"))
        with contextlib.closing(writer), contextlib.suppress(OSError):
            hello = json.loads(await asyncio.wait_for(reader.readline(), REPLY_S))
            if not hmac.compare_digest(hello["password"], self._password):
                return
            owner = self._owners[hello["key"]] = _Owner(hello["key"], hello["name"])
            try:
                writer.write(b"\n")
                await reader.read()  # nothing is ever sent, so this returns when the connection ends
            finally:
                del self._owners[owner.key]
                self._leave(owner)

    async def acquire(self, key: str, timeout_s: float) -> bool:
        owner = self._owner(key)
        if owner is self._holder:
            raise RuntimeError(f"{owner.name} holds this lock already")
        if any(waiter.owner is owner for waiter in self._queue):
            raise RuntimeError(f"{owner.name} waits for this lock already")
        waiter = _Waiter(owner, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._grant_next()
        try:
            await asyncio.wait([waiter.is_granted], timeout=timeout_s)
        except asyncio.CancelledError:  # by `ray.cancel`
            self._leave(owner)
            raise
        if not waiter.is_granted.done():
            self._queue.remove(waiter)
            return False
        return waiter.is_granted.result()

    async def release(self, key: str) -> None:
        owner = self._owner(key)
        if self._holder is not owner:
            holder = self._holder.name if self._holder else "nobody"
            raise RuntimeError(f"{owner.name} releases a lock that {holder} holds")
        self._leave(owner)

    async def holder(self) -> str | None:
        return self._holder.name if self._holder else None

    async def num_waiting(self) -> int:
        return len(self._queue)

    def _owner(self, key: str) -> _Owner:
        if key not in self._owners:
            raise RuntimeError(
                "the caller's connection to the lock broke, and with it its lease ended: acquire it again"
            )
        return self._owners[key]

    def _leave(self, owner: _Owner) -> None:
        """Let `owner` give up the lock, or stop waiting for it."""
        for waiter in [waiter for waiter in self._queue if waiter.owner is owner]:
            self._queue.remove(waiter)
            waiter.is_granted.set_result(False)
        if self._holder is owner:
            self._holder = None
        self._grant_next()

    def _grant_next(self) -> None:
        if self._holder is None and self._queue:
            waiter = self._queue.popleft()
            self._holder = waiter.owner
            waiter.is_granted.set_result(True)
