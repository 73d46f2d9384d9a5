"""Stopped processes are named, and a run without Ray ends by name, with nothing left of it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import TIMEOUT_S

from open_instruct.cluster import process_watch
from open_instruct.cluster.process_watch import (
    RUN_MARK,
    ProcessWatch,
    RayWatch,
    Stopped,
    find_stopped,
    kill_marked,
    marked,
)

pytestmark = [pytest.mark.extended, pytest.mark.alone]

LIMIT_S = 1.0


@pytest.fixture
def actor(ray_session: Any) -> Iterator[Any]:
    """With a child process, as an engine has its core."""

    class Parent:
        def __init__(self) -> None:
            self._child = subprocess.Popen(["sleep", "600"])

        def pids(self) -> tuple[int, int]:
            return os.getpid(), self._child.pid

    actor = ray_session.remote(Parent).options(num_cpus=0).remote()
    yield actor
    for pid in ray_session.get(actor.pids.remote(), timeout=TIMEOUT_S):
        os.kill(pid, signal.SIGKILL)


def until_told(watch: ProcessWatch, limit_s: float = 15.0) -> list[Stopped]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if told := watch.stopped():
            return told
        time.sleep(0.1)
    return []


@pytest.mark.parametrize("which", [0, 1], ids=["actor", "child"])
def test_a_stopped_process_is_named_once_it_was_stopped_for_long_enough(
    ray_session: Any, actor: Any, which: int
) -> None:
    pids = ray_session.get(actor.pids.remote(), timeout=TIMEOUT_S)
    watch = ProcessWatch(lambda: {"learner 0": actor}, LIMIT_S)
    assert until_told(watch, 3.0) == []
    os.kill(pids[which], signal.SIGSTOP)
    try:
        [told] = until_told(watch)
        assert (told.name, told.pid) == ("learner 0", pids[0])
        assert told.seconds > LIMIT_S
        assert str(told).startswith(f"learner 0 (process {pids[0]}) has been stopped for ")
    finally:
        os.kill(pids[which], signal.SIGCONT)


def test_a_process_that_goes_on_in_time_is_not_named(
    ray_session: Any, actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "EVERY_S", 0.1)
    pid, _ = ray_session.get(actor.pids.remote(), timeout=TIMEOUT_S)
    watch = ProcessWatch(lambda: {"learner 0": actor}, 5.0)
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        assert until_told(watch, 3.0) == []
        os.kill(pid, signal.SIGCONT)
        assert until_told(watch, 0.5) == []


def test_a_dead_actor_is_known_though_nobody_asks_it_anything(ray_session: Any, actor: Any) -> None:
    class Sleeper:
        def pid(self) -> int:
            return os.getpid()

    ray_session.get(actor.pids.remote(), timeout=TIMEOUT_S)
    keeper = ray_session.remote(Sleeper).options(num_cpus=0).remote()
    pid = ray_session.get(keeper.pid.remote(), timeout=TIMEOUT_S)
    watch = ProcessWatch(lambda: {"learner 0": actor, "the keeper of the lock": keeper}, LIMIT_S)
    watch.stopped()
    assert watch.dead == []
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while not watch.dead and time.monotonic() - killed < 15:  # two seconds, on a machine with nothing else to do
        watch.stopped()
        time.sleep(0.1)
    assert watch.dead == ["the keeper of the lock"]


def test_a_stopped_verifier_is_not_its_actor(ray_session: Any) -> None:
    """The pool sees to its own processes."""

    class Controller:
        def __init__(self) -> None:
            from open_instruct.verifiers.pool import VerifierPool

            self._pool = VerifierPool(1, 5.0)
            self._pool.score_group("string_matcher", "a", [[]], ["<answer>a</answer>"])

        def pids(self) -> list[int]:
            import psutil

            return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    controller = ray_session.remote(Controller).options(num_cpus=0).remote()
    own, *children = ray_session.get(controller.pids.remote(), timeout=TIMEOUT_S)
    assert len(children) >= 2
    for child in children:
        os.kill(child, signal.SIGSTOP)
    assert find_stopped([own]) == []
    for child in children:
        os.kill(child, signal.SIGKILL)
    ray_session.kill(controller)


def test_a_dead_process_is_not_a_stopped_one() -> None:
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    assert find_stopped([process.pid]) == []  # a zombie
    process.wait()
    assert find_stopped([process.pid]) == []


def test_a_process_of_ray_that_ends_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the thread that looks would end of it, and nobody would look any more."""
    watch = RayWatch({"Ray's raylet": os.getpid()}, "no-such-mark", limit_s=12.0)
    ends: list[str] = []

    def end(cause: str) -> None:
        ends.append(cause)
        watch.stop()

    def status() -> str:
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(watch, "_end", end)
    # Of this process alone: the watch of the session's own Ray would end the tests.
    monkeypatch.setattr(watch._processes["Ray's raylet"], "status", status)
    watch.run()
    assert ends == [f"Ray's raylet (process {os.getpid()}) is gone"]


def test_marked_processes_end_even_if_they_are_stopped() -> None:
    with marked() as mark:
        process = subprocess.Popen(["sleep", "600"])
    other = subprocess.Popen(["sleep", "600"])
    assert RUN_MARK not in os.environ
    process.send_signal(signal.SIGSTOP)
    kill_marked(mark)
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_process_that_is_just_being_started_is_looked_at_again() -> None:
    """In `exec` it shows no mark for a moment."""
    for _ in range(200):
        with marked() as mark:
            process = subprocess.Popen(["sleep", "600"])
        assert process_watch._kill_if_marked(Path(f"/proc/{process.pid}"), mark)
        process.kill()
        process.wait()


DRIVER = """
import os, subprocess, sys, time
import ray
from open_instruct.run.ray_session import ray_cluster
from open_instruct.cluster.process_watch import ray_processes_here
class Actor:
    def __init__(self):
        self.child = subprocess.Popen(["sleep", "600"])
    def pid(self):
        return os.getpid()
with ray_cluster(stopped_timeout_s=2.0):
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    ray.get(actor.pid.remote())
    print(ray_processes_here()[sys.argv[1]], flush=True)
    while True:  # as the driver waits
        ray.wait([actor.pid.remote()], timeout=0.5)
        ray.nodes()
        time.sleep(0.1)
"""
TEST_MARK = "OPEN_INSTRUCT_TEST_PROCESS_WATCH"


def left_of(mark: str) -> list[str]:
    """Processes that carry the mark; Ray's workers have it from the driver."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as title:
                if f"{TEST_MARK}={mark}".encode() in environ.read().split(b"\0"):
                    found.append(title.read().decode()[:60])
        except OSError:
            continue
    return found


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("name", ["Ray's GCS", "Ray's raylet"])
def test_a_run_without_ray_ends_by_name_and_leaves_nothing(name: str, what: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    env = {**os.environ, TEST_MARK: mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, name], env=env, text=True, **pipes)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    os.kill(pid, what)
    started = time.monotonic()
    _, errors = driver.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert driver.returncode == 1, errors
    words = "is gone" if what == signal.SIGKILL else "has been stopped for"
    assert f"{name} (process {pid}) {words}" in errors
    wait_until_nothing_is_left(mark)


def wait_until_nothing_is_left(mark: str) -> None:
    deadline = time.monotonic() + 10
    while left := left_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_driver_that_is_killed_leaves_nothing() -> None:
    """Ray's agents write their titles over the environment, and stay for a minute by themselves."""
    mark = uuid.uuid4().hex
    env = {**os.environ, TEST_MARK: mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, "Ray's raylet"], env=env, text=True, **pipes)
    assert driver.stdout is not None
    assert driver.stdout.readline()
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("Agent" in word for one in family for word in one.cmdline())
    driver.kill()
    driver.communicate(timeout=30)
    gone, left = psutil.wait_procs(family, timeout=10)
    assert not left
    assert len(gone) > 4
    wait_until_nothing_is_left(mark)
