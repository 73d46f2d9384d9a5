"""Devices as Ray shows them, and the lock: fair, owned, and free again as soon as its owner is dead."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from open_instruct.cluster.ray_lock import Lock as LockOfItsModule
from open_instruct.cluster.ray_utils import (
    NOSET_VISIBLE_DEVICES_ENV_VARS_LIST,
    Lock,
    get_physical_gpu_id,
    ray_noset_visible_devices,
)

REPLY_S = 30.0
SOON_S = 10.0
"""By when a death has been noticed: at once, but the machine may be busy."""


# --- devices ----------------------------------------------------------------------------------------------------------


def test_the_variables_are_those_that_ray_reads() -> None:
    accelerators = Path(ray.__file__).parent / "_private" / "accelerators"
    sources = "".join(path.read_text() for path in accelerators.glob("*.py"))
    assert set(NOSET_VISIBLE_DEVICES_ENV_VARS_LIST) == set(re.findall(r"RAY_EXPERIMENTAL_NOSET_[A-Z_]*[A-Z]", sources))


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_noset_is_read_as_ray_reads_it(value: str | None, expected: bool) -> None:
    for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST:
        assert ray_noset_visible_devices({} if value is None else {name: value}) is expected


class Worker:
    """An actor that uses a lock as learners do: one method takes it, another gives it back."""

    def pid(self) -> int:
        return os.getpid()

    def gpu_id(self) -> str:
        return get_physical_gpu_id()

    def acquire(self, lock: Lock, timeout: float = 20.0) -> bool:
        return ray.get(lock.acquire.remote(timeout=timeout), timeout=REPLY_S)

    def release(self, lock: Lock) -> None:
        ray.get(lock.release.remote(), timeout=REPLY_S)

    def leave(self) -> None:
        ray.actor.exit_actor()

    def hold(self, lock: Lock, timeout_s: float) -> None:
        with lock.held(timeout_s):
            pass


def start_worker(**options: Any) -> Any:
    return ray.remote(Worker).options(num_cpus=0, **options).remote()


@pytest.fixture(scope="module")
def workers(ray_session: Any) -> Iterator[list[Any]]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    actors = [start_worker() for _ in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def lock(ray_session: Any) -> Iterator[Lock]:
    lock = Lock.remote()
    yield lock
    lock.shut_down()


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=REPLY_S)


def test_a_slot_is_a_bundle_or_else_a_worker(workers: list[Any]) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 0.1}, {"CPU": 0.1}])
    get(group.ready())
    placed = [
        start_worker(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index))
        for index in (0, 0, 1)
    ]
    first, same_bundle, other_bundle = get([worker.gpu_id.remote() for worker in placed])
    free = get([worker.gpu_id.remote() for worker in workers])
    again = get([worker.gpu_id.remote() for worker in workers])
    remove_placement_group(group)
    assert first == same_bundle != other_bundle
    assert free == again
    assert len({first, other_bundle, get_physical_gpu_id(), *free}) == 3 + len(free)
    node_id = ray.get_runtime_context().get_node_id()
    assert all(name.startswith(f"CPU-{node_id}-") for name in (first, other_bundle, *free))


# --- the lock ---------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def queue_up(lock: Lock, worker: Any, *, timeout: float = 20.0) -> Any:
    """Have `worker` wait for the lock; returns once it does."""
    num_waiting = get(lock._keeper.num_waiting.remote())
    ref = worker.acquire.remote(lock, timeout)
    wait_until(lambda: get(lock._keeper.num_waiting.remote()) == num_waiting + 1)
    return ref


def test_the_usage_of_the_document(ray_session: Any) -> None:
    assert LockOfItsModule is Lock
    lock = Lock.options(num_cpus=0, num_gpus=0).remote()
    assert get(lock.acquire.remote()) is True
    assert get(lock.release.remote()) is None
    assert get(lock.acquire.remote(timeout=0)) is True  # it is free again
    with pytest.raises(ValueError, match="every wait has an end"):
        lock.acquire.remote(timeout=None)


def test_first_come_first_served(lock: Lock, workers: list[Any]) -> None:
    get(lock.acquire.remote())
    waiting = [queue_up(lock, worker) for worker in workers]
    get(lock.release.remote())
    for number, (worker, ref) in enumerate(zip(workers, waiting, strict=True)):
        assert get(ref) is True
        assert ray.wait(waiting, num_returns=3, timeout=0.1)[0] == waiting[: number + 1]
        get(worker.release.remote(lock))


def test_a_wait_that_takes_too_long_is_false_and_keeps_no_place(lock: Lock, workers: list[Any]) -> None:
    first, second, third = workers
    assert get(first.acquire.remote(lock))
    started = time.monotonic()
    in_time = queue_up(lock, second, timeout=3.0)
    behind_it = queue_up(lock, third)
    assert get(in_time) is False
    assert 3.0 <= time.monotonic() - started < 3.0 + SOON_S
    get(first.release.remote(lock))
    assert get(behind_it) is True


def test_the_same_process_cannot_acquire_twice(lock: Lock, workers: list[Any]) -> None:
    get(lock.acquire.remote())
    with pytest.raises(RuntimeError, match=r"the driver \(process \d+ on .*\) holds this lock already"):
        get(lock.acquire.remote())
    assert get(lock.release.remote()) is None
    assert get(workers[0].acquire.remote(lock))
    waiting = lock.acquire.remote()
    with pytest.raises(RuntimeError, match="waits for this lock already"):
        get(lock.acquire.remote())
    get(workers[0].release.remote(lock))
    assert get(waiting) is True


def test_only_the_owner_releases(lock: Lock, workers: list[Any]) -> None:
    pid = get(workers[0].pid.remote())
    assert get(workers[0].acquire.remote(lock))
    owner = rf"actor \w+ in Worker\.acquire \(process {pid} on .*\)"
    with pytest.raises(RuntimeError, match=rf"the driver \(.*\) releases a lock that {owner} holds"):
        get(lock.release.remote())
    with pytest.raises(RuntimeError, match=rf"Worker\.release .* releases a lock that {owner} holds"):
        get(workers[1].release.remote(lock))
    assert re.fullmatch(owner, get(lock.holder.remote()))
    get(workers[0].release.remote(lock))
    with pytest.raises(RuntimeError, match="releases a lock that nobody holds"):
        get(lock.release.remote())


def test_held_gives_back_whatever_happens_and_names_who_is_in_the_way(lock: Lock, workers: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), lock.held(1):
        _ = 1 / 0
    with (
        lock.held(1),
        pytest.raises(TimeoutError, match=r"did not become free within 0.1 s; the driver \(.*\) holds it"),
    ):
        get(workers[0].hold.remote(lock, 0.1))
    get(workers[0].hold.remote(lock, 1))


@pytest.mark.parametrize("kill", ["SIGKILL", "ray.kill", "exit_actor"])
def test_a_dead_holder_loses_the_lock(lock: Lock, workers: list[Any], kill: str) -> None:
    holder = start_worker()
    assert get(holder.acquire.remote(lock))
    waiting = queue_up(lock, workers[0])
    if kill == "SIGKILL":
        os.kill(get(holder.pid.remote()), signal.SIGKILL)
    elif kill == "ray.kill":
        ray.kill(holder)
    else:
        holder.leave.remote()
    assert get(waiting) is True
    get(workers[0].release.remote(lock))


def test_a_dead_waiter_is_passed_over(lock: Lock, workers: list[Any]) -> None:
    assert get(workers[0].acquire.remote(lock))
    dead = start_worker()
    queue_up(lock, dead)
    alive = queue_up(lock, workers[1])
    ray.kill(dead)
    wait_until(lambda: get(lock._keeper.num_waiting.remote()) == 1)
    get(workers[0].release.remote(lock))
    assert get(alive) is True


def test_a_waiter_that_dies_just_when_its_turn_comes_does_not_keep_the_lock(lock: Lock, workers: list[Any]) -> None:
    assert get(workers[0].acquire.remote(lock))
    dying = start_worker()
    pid = get(dying.pid.remote())
    queue_up(lock, dying)
    alive = queue_up(lock, workers[1])
    released = workers[0].release.remote(lock)
    os.kill(pid, signal.SIGKILL)
    get(released)
    assert get(alive) is True


def test_a_call_that_is_cancelled_keeps_no_place(lock: Lock, workers: list[Any]) -> None:
    assert get(workers[0].acquire.remote(lock))
    ours = lock.acquire.remote()
    wait_until(lambda: get(lock._keeper.num_waiting.remote()) == 1)
    ray.cancel(ours)
    wait_until(lambda: get(lock._keeper.num_waiting.remote()) == 0)
    get(workers[0].release.remote(lock))
    assert get(workers[1].acquire.remote(lock))


@ray.remote(num_cpus=0, max_retries=0)
def take_in_a_task(lock: Lock, *, killed: bool) -> None:
    assert ray.get(lock.acquire.remote(timeout=20), timeout=REPLY_S)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed", [False, True])
def test_a_tasks_lease_ends_with_the_task(lock: Lock, workers: list[Any], killed: bool) -> None:
    ref = take_in_a_task.remote(lock, killed=killed)
    if killed:
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            get(ref)
    else:
        get(ref)
    assert get(workers[0].acquire.remote(lock, SOON_S))


OTHER_DRIVER = """
import os, signal, sys
import ray
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
from open_instruct.cluster.ray_utils import Lock
lock = Lock(ray.get_actor("shared lock"))
assert ray.get(lock.acquire.remote(), timeout=30)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["left", "killed"])
def test_a_drivers_lease_ends_with_it(ray_session: Any, workers: list[Any], end: str) -> None:
    lock = Lock.options(name="shared lock").remote()
    context = ray.get_runtime_context()
    command = [sys.executable, "-c", OTHER_DRIVER, context.gcs_address, context.namespace, end]
    env = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # or Ray looks for it where it does not listen
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    assert get(workers[0].acquire.remote(lock, SOON_S))
    lock.shut_down()


def test_a_child_does_not_keep_its_parents_lease(lock: Lock, workers: list[Any]) -> None:
    class Parent(Worker):
        def fork(self) -> int:
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            return child

    parent = ray.remote(Parent).options(num_cpus=0).remote()
    assert get(parent.acquire.remote(lock))
    child = get(parent.fork.remote())
    os.kill(get(parent.pid.remote()), signal.SIGKILL)
    assert get(workers[0].acquire.remote(lock, SOON_S))
    os.kill(child, signal.SIGKILL)


def test_a_stranger_is_not_let_in(lock: Lock) -> None:
    import socket

    host, port, _ = get(lock._keeper.open_door.remote())
    for hello in (b'{"password": "guess", "key": "k", "name": "n"}\n', b"GET / HTTP/1.1\r\n", b"{}\n"):
        with socket.create_connection((host, port), timeout=REPLY_S) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(1) == b""
    assert get(lock.acquire.remote())
