"""What holds for all processes that work for a part of the program, whatever the part: `docs/reference/architecture.md`."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import cell_users
import psutil
import pytest
from cell_users import DIE, FLOOD, HANG, KEY, LIMIT_S, RIGHT, USERS, WHOLE_S, CellUser, is_alive, wait_until

from open_instruct.system.sandbox import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="this kernel has no jail")
MARK = f"what a model wrote {os.getpid()}"
NUMBERS = itertools.count()
ALL = list(USERS)
FORKED = ["scorers", "programs", "environments", "tool"]
"""Users whose cells are forked by a process that has loaded their code."""
WITHOUT_KEYS = ["scorers", "programs", "tool"]
START_PROCESSES = ["environments", "agents", "functions"]
"""Users whose cells may start processes."""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CellUser]]:
    os.environ[KEY] = f"secret {os.getpid()}"
    opened: dict[str, CellUser] = {}
    yield opened
    for user in opened.values():
        user.close()
    del os.environ[KEY]


@pytest.fixture
def user(
    users: dict[str, CellUser], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CellUser:
    name = request.param
    if name not in users:
        users[name] = USERS[name](tmp_path_factory.mktemp(name))
    assert users[name].start(RIGHT).result(WHOLE_S) == "right"
    return users[name]


def of(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("user", names, indirect=True)


def memory_has(pid: int, text: str) -> bool:
    """Whether a process has this text anywhere in its memory."""
    with (
        suppress(ProcessLookupError, FileNotFoundError),
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "rb") as memory,
    ):
        return any(text.encode() in content for content in _contents(maps, memory))
    return False


def _contents(maps: Iterable[str], memory: BinaryIO) -> Iterator[bytes]:
    for line in maps:
        extent, rights, *_ = line.split()
        start, end = (int(number, 16) for number in extent.split("-"))
        if rights.startswith("rw"):
            with suppress(OSError):  # pages that are the kernel's own
                memory.seek(start)
                yield memory.read(end - start)


def connections(pid: int) -> set[str]:
    """Sockets and pipes that a process holds; none if it has ended."""
    links = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {link for link in links if link.startswith(("socket:", "pipe:"))}


def begin(user: CellUser) -> tuple["Future[str]", int]:
    """Work that hangs, and the cell that does it."""
    while True:
        mark = f"{MARK} {next(NUMBERS)}"
        hanging = user.start(f"{HANG} {mark}")
        while not hanging.done():
            cells = {pid for pid in user.cells() if memory_has(pid, mark)}
            if cells and is_alive(min(cells)):
                return hanging, min(cells)  # a program's test knows the program's text, too, and is begun after it
            time.sleep(0.02)
        assert is_late(hanging.result())  # a busy machine was too slow to look at it in time


def is_late(outcome: str) -> bool:
    return any(words in outcome.lower() for words in ("timeout", "longer than"))


def works(user: CellUser) -> bool:
    return user.start(RIGHT).result(WHOLE_S) == "right"


def begin_and_send(user: CellUser, number: signal.Signals) -> tuple["Future[str]", int]:
    """Work that hangs, and the cell that does it, which has got this signal before its deadline."""
    while True:
        hanging, cell = begin(user)
        with suppress(ProcessLookupError):
            os.kill(cell, number)
            return hanging, cell
        hanging.result(WHOLE_S)


def end(hanging: "Future[str]", cell: int) -> None:
    """End work that hangs before its deadline. A scorer's is tried once more."""
    with suppress(ProcessLookupError):
        os.kill(cell, signal.SIGKILL)
    hanging.result(WHOLE_S)


@of(ALL)
def test_work_that_hangs_ends_at_its_deadline_and_costs_no_other(user: CellUser) -> None:
    before, started = len(user.processes()), time.monotonic()
    hanging = user.start(HANG)
    assert works(user)
    assert not hanging.done()
    assert is_late(hanging.result(WHOLE_S))
    assert time.monotonic() - started > LIMIT_S - 0.5
    wait_until(lambda: len(user.processes()) <= before + 2, 20.0)  # cells that wait for work, and no more
    assert works(user)


@of(ALL)
def test_stopped_cell_ends_at_its_deadline(user: CellUser) -> None:
    hanging, cell = begin_and_send(user, signal.SIGSTOP)
    assert is_late(hanging.result(WHOLE_S))
    wait_until(lambda: not is_alive(cell), 20.0)
    assert works(user)


@of(ALL)
def test_cell_that_dies_costs_its_own_work_alone(user: CellUser) -> None:
    failures = [user.start(DIE) for _ in range(3)]
    assert works(user)
    for failure in failures:
        outcome = failure.result(WHOLE_S)
        assert outcome != "right"
        assert not is_late(outcome)
    assert works(user)


@of(ALL)
def test_answer_that_is_too_long_costs_its_own_work_alone(user: CellUser) -> None:
    flood = user.start(FLOOD)
    assert works(user)
    assert flood.result(WHOLE_S) != "right"
    assert works(user)


@of(ALL)
def test_cell_that_is_killed_from_outside_is_replaced(user: CellUser) -> None:
    hanging, _ = begin_and_send(user, signal.SIGKILL)  # as the kernel does where memory runs out
    assert hanging.result(WHOLE_S) != "right"
    assert works(user)


@of(START_PROCESSES)
def test_what_a_cell_has_started_ends_with_it(user: CellUser) -> None:
    hanging, cell = begin(user)
    descendants = [child.pid for child in psutil.Process(cell).children(recursive=True)]
    while not descendants:
        time.sleep(0.02)
        descendants = [child.pid for child in psutil.Process(cell).children(recursive=True)]
    os.kill(cell, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, descendants)), 20.0)
    assert hanging.result(WHOLE_S) != "right"


@of(FORKED)
def test_fork_server_never_sees_what_a_model_wrote(user: CellUser) -> None:
    hanging, cell = begin(user)
    servers = user.fork_servers()
    assert servers
    assert not any(memory_has(pid, MARK) for pid in servers)
    end(hanging, cell)


@of(ALL)
def test_cell_holds_no_connection_of_another_cell(user: CellUser) -> None:
    own = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
    sets: list[set[str]] = []
    while not sets or not all(sets):
        work = [begin(user), begin(user)]
        cells = {cell for _, cell in work}
        sets = [connections(cell) - own for cell in cells] if len(cells) == 2 else [set()]
        for hanging, cell in work:
            end(hanging, cell)
    assert not sets[0] & sets[1]


@of(FORKED)
def test_fork_server_that_dies_is_replaced_and_takes_its_cells_with_it(user: CellUser) -> None:
    hanging, cell = begin(user)
    for pid in user.fork_servers():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(cell), 20.0)
    hanging.result(WHOLE_S)
    assert works(user)


@of(FORKED)
def test_fork_server_outlives_the_signals_of_a_terminal_and_a_job_queue(user: CellUser) -> None:
    before = user.fork_servers()
    for pid in before:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert works(user)
    assert user.fork_servers() == before


@of(WITHOUT_KEYS)
def test_cell_inherits_no_key(user: CellUser) -> None:
    hanging, cell = begin(user)
    assert b"PATH" in Path(f"/proc/{cell}/environ").read_bytes()
    assert KEY.encode() not in Path(f"/proc/{cell}/environ").read_bytes()
    assert not memory_has(cell, os.environ[KEY])
    end(hanging, cell)


@of(FORKED)
def test_cell_is_killed_first_if_memory_runs_out(user: CellUser) -> None:
    hanging, cell = begin(user)
    assert Path(f"/proc/{cell}/oom_score_adj").read_text() == "1000\n"
    end(hanging, cell)


@pytest.mark.parametrize("name", ALL)
def test_no_process_outlives_an_owner_that_is_killed(name: str, tmp_path: Path) -> None:
    script = str(Path(cell_users.__file__))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, script, name, str(tmp_path)], env=variables, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        processes = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    assert len(processes) >= USERS[name].depth
    wait_until(lambda: not any(is_alive(process.pid) for process in processes), 20.0)
