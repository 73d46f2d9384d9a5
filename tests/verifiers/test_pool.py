"""The pool keeps its promises whatever a verifier does to its process."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from verifier_fakes import Lacking, Unstartable, score_by_text, score_environment, score_is_worker

from open_instruct.verifiers import pool as pool_module
from open_instruct.verifiers.pool import GROUPS_PER_SCORER, VerifierPool, default_workers
from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows
from open_instruct.verifiers.scoring_processes import Scored

RIGHT = Scored(1.0)
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(1, TIMEOUT_S, score=score_by_text) as pool:
        yield pool


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 2), (2, 2), (16, 4), (192, 16)])
def test_workers_by_default(num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "num_cores", lambda: num_cores)
    assert default_workers() == expected


def score_texts(pool: VerifierPool, *texts: str) -> list[Scored]:
    return pool.score_group("fake", "4", [[1]] * len(texts), list(texts))


def children(parent: int) -> set[int]:
    """Living child processes."""
    pids = set()
    for process in Path("/proc").iterdir():
        try:
            status = (process / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent and status[0] != "Z":
                pids.add(int(process.name))
        except (OSError, ValueError, IndexError):  # not a process, or gone by now
            continue
    return pids


def fork_servers(parent: int) -> set[int]:
    """Of the children of a process, those that fork scorers."""
    return {pid for pid in children(parent) if b"verifiers.scorers" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def scorers(parent: int) -> set[int]:
    return {pid for fork_server in fork_servers(parent) for pid in children(fork_server)}


def workers(parent: int) -> set[int]:
    return fork_servers(parent) | scorers(parent)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: set[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def test_scores_come_in_order(pool: VerifierPool) -> None:
    assert score_texts(pool, "4", "5", "4") == [RIGHT, Scored(0.0), RIGHT]
    assert score_texts(pool) == []


def test_a_verifier_that_cannot_be_loaded_costs_its_own_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Also where a scorer is there that other rows left: a verifier may have refused this machine."""
    with VerifierPool(1, 30, ready=["reasoning_gym/nope", "zzz", "gsm8k"], score=score_by_text) as pool:
        for dataset in ("reasoning_gym/nope", "gsm8k", "reasoning_gym/nope", "zzz"):
            results = pool.score_group(dataset, "4", [[1]] * 2, ["4", "5"])
            if dataset == "gsm8k":
                assert results == [RIGHT, Scored(0.0)]
            else:
                assert [result.score for result in results] == [None, None]
                assert str(results[0].failure).startswith("unavailable: ValueError: ")
                assert dataset in str(results[0].failure)
        assert pool.counts == {"unavailable": 6}
    assert caplog.text.count("rows of 'zzz' are not scored, because") == 1


@pytest.mark.parametrize("text", ["hang", "hang_in_c"])
def test_a_hanging_verifier_costs_its_own_response_alone(pool: VerifierPool, text: str) -> None:
    before = pool.counts["timeout"]
    start = time.monotonic()
    assert score_texts(pool, "4", text, "4") == [RIGHT, Scored(None, "timeout"), RIGHT]
    assert time.monotonic() - start > TIMEOUT_S
    assert pool.counts["timeout"] == before + 1


def test_hanging_responses_of_a_group_cost_one_limit() -> None:
    with VerifierPool(1, 4.0, score=score_by_text) as pool:
        score_texts(pool, "4")
        start = time.monotonic()
        assert score_texts(pool, *["hang"] * 64, "4") == [Scored(None, "timeout")] * 64 + [RIGHT]
        assert time.monotonic() - start < 3 * 4.0


@pytest.mark.parametrize("text", ["die", "exit"])
def test_a_verifier_that_ends_its_process_costs_its_own_response_alone(pool: VerifierPool, text: str) -> None:
    before = pool.counts["crash"]
    crash = Scored(None, "crash")
    assert score_texts(pool, text, "4", text, "4", text) == [crash, RIGHT, crash, RIGHT, crash]
    assert pool.counts["crash"] == before + 3


def test_a_response_whose_process_was_killed_is_tried_once_more(pool: VerifierPool) -> None:
    """Most are killed by something else: the machine is short of memory, for one."""
    score_texts(pool, "4")
    future = pool.submit("fake", "4", [[1]] * 2, [f"sleep {TIMEOUT_S / 2}", "4"])
    time.sleep(TIMEOUT_S / 10)
    for pid in scorers(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    assert future.result(timeout=30) == [Scored(0.0), RIGHT]


def test_a_stopped_process_blocks_nobody(pool: VerifierPool) -> None:
    score_texts(pool, "4")
    (pid,) = scorers(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert score_texts(pool, "x" * 5_000_000, "4") == [Scored(0.0), RIGHT]
    assert score_texts(pool, "4") == [RIGHT]
    assert time.monotonic() - start < 10 * TIMEOUT_S


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("raise", "error: KeyError: 'no such thing'"),
        ("recurse", "error: RecursionError: "),
        ("too_much", "error: ValueError: a verifier's score lies in [0, 1], got 1.5"),
    ],
)
def test_a_verifier_that_raises_is_named(pool: VerifierPool, text: str, failure: str) -> None:
    score_texts(pool, "4")
    before, processes = pool.counts["error"], workers(os.getpid())
    right, wrong, also_right = score_texts(pool, "4", text, "4")
    assert (right, also_right) == (RIGHT, RIGHT)
    assert wrong.score is None
    assert str(wrong.failure).startswith(failure)
    assert pool.counts["error"] == before + 1
    assert workers(os.getpid()) == processes, "an exception needs no new process"


def test_the_timeout_is_for_each_response(pool: VerifierPool) -> None:
    texts = [f"sleep {TIMEOUT_S / 2}"] * 3
    assert [result.failure for result in score_texts(pool, *texts)] == [None] * 3


def test_verifiers_may_print(pool: VerifierPool) -> None:
    assert score_texts(pool, "print", "4") == [Scored(0.0), RIGHT]


def test_scorers_are_replaced_now_and_then(pool: VerifierPool) -> None:
    """What a response did to its process does not stay for ever."""
    score_texts(pool, "4")
    (pid,) = scorers(os.getpid())
    for _ in range(GROUPS_PER_SCORER):
        assert score_texts(pool, "4") == [RIGHT]
    assert pid not in scorers(os.getpid())


@pytest.mark.parametrize("way", ["reply", "answer"])
@pytest.mark.parametrize(
    "reply",
    [
        "",
        "{}",
        "[1.0]",
        "[1.0, null]",
        "[2.0, null, 0, null, null]",
        "[true, null, 0, null, null]",
        "[NaN, null, 0, null, null]",
        '["1.0", null, 0, null, null]',
        "[1.0, 7, 0, null, null]",
        "[1.0, null, -1, null, null]",
        "[1.0, null, true, null, null]",
        "[1.0, null, Infinity, null, null]",
        "[1.0, null, null, null, null]",
        "[1.0, null, 0]",
        "[1.0, null, 0, 7, null]",
        '[1.0, null, 0, "' + "x" * 121 + '", null]',
        "[" * 4000,
        "x" * 5000,
    ],
)
def test_a_reply_that_is_none_is_not_believed(pool: VerifierPool, way: str, reply: str) -> None:
    """A response that has taken its process over can say what it likes, in the form of a score alone."""
    assert score_texts(pool, f"{way} {reply}", "4") == [Scored(None, "crash"), RIGHT]


@pytest.mark.parametrize(
    "reply", ["[1.0, null, 0, null, null]", "[1.0, null, 0, null, null]\n[1.0, null, 0, null, null]"]
)
def test_a_response_that_does_not_know_its_secret_gets_no_score(pool: VerifierPool, reply: str) -> None:
    assert score_texts(pool, f"reply {reply}", "4") == [Scored(None, "crash"), RIGHT]


def test_a_response_that_knows_its_secret_answers_for_itself_alone(pool: VerifierPool) -> None:
    """Its neighbours, which have been sent to the same process, are scored by another one."""
    texts = ["answer [0.5, null, 0, null, null]\n[1.0, null, 0, null, null]\n[1.0, null, 0, null, null]", "5", "6", "4"]
    assert score_texts(pool, *texts) == [Scored(0.5), Scored(0.0), Scored(0.0), RIGHT]
    assert score_texts(pool, texts[0]) == [Scored(0.5)]


def test_responses_of_any_text_and_size_travel(pool: VerifierPool) -> None:
    assert score_texts(pool, "\ud800", "\0", "x" * 5_000_000, "4") == [Scored(0.0)] * 3 + [RIGHT]
    more_than_a_socket_holds = ["x" * 30_000] * 10
    assert score_texts(pool, *more_than_a_socket_holds, "4") == [Scored(0.0)] * 10 + [RIGHT]


@pytest.mark.parametrize("find", [scorers, fork_servers])
def test_a_process_that_died_between_groups_costs_nothing(pool: VerifierPool, find: Callable[[int], set[int]]) -> None:
    score_texts(pool, "4")
    (pid,) = find(os.getpid())
    os.kill(pid, signal.SIGKILL)
    wait_for_end({pid}, 5)
    assert score_texts(pool, "4") == [RIGHT]


def test_processes_outlive_the_signals_of_a_terminal_and_a_job_queue(pool: VerifierPool) -> None:
    score_texts(pool, "4")
    before = workers(os.getpid())
    for pid in before:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert score_texts(pool, "4") == [RIGHT]
    assert workers(os.getpid()) == before


def test_works_from_any_thread(pool: VerifierPool) -> None:
    results: list[list[Scored]] = []
    threads = [threading.Thread(target=lambda: results.append(score_texts(pool, "4", "5"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [[RIGHT, Scored(0.0)]] * 4


def test_groups_are_scored_side_by_side() -> None:
    with VerifierPool(2, 30, score=score_by_text) as pool:
        for future in [pool.submit("fake", "4", [[1]], ["4"]) for _ in range(4)]:
            future.result(timeout=60)
        start = time.monotonic()
        slow, quick = (pool.submit("fake", "4", [[1]], [text]) for text in ("sleep 5", "4"))
        assert quick.result(timeout=4) == [RIGHT]
        assert not slow.done()
    assert time.monotonic() - start < 4, "close() waits for no verifier"


def test_one_thread_scores_one_group_after_another() -> None:
    """Threads that waited for their turn would have to wake each other for every group."""
    before = set(threading.enumerate())
    with VerifierPool(1, 30, score=score_by_text) as pool:
        for future in [pool.submit("fake", "4", [[1]], ["4"]) for _ in range(32)]:
            assert future.result(timeout=60) == [RIGHT]
        assert len(set(threading.enumerate()) - before) == 1


def test_close_ends_all_processes_at_once() -> None:
    before = fork_servers(os.getpid())
    pool = VerifierPool(2, 60, score=score_by_text)
    busy = [pool.submit("fake", "4", [[1]] * 2, ["4", "hang"]) for _ in range(3)]
    (fork_server,) = fork_servers(os.getpid()) - before
    deadline = time.monotonic() + 30
    while len(children(fork_server)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    processes = {fork_server} | children(fork_server)
    pool.close()
    pool.close()
    wait_for_end(processes, 5)
    for future in busy:
        with pytest.raises((RuntimeError, CancelledError)):
            future.result(timeout=10)
    with pytest.raises(RuntimeError, match="is closed"):
        score_texts(pool, "4")


def test_hanging_responses_of_many_groups_cost_one_limit() -> None:
    """16 groups with 4 of them each, one worker: one after another they would take 16 limits."""
    with VerifierPool(1, 8.0, score=score_by_text) as pool:
        score_texts(pool, "4")
        start = time.monotonic()
        futures = [pool.submit("fake", "4", [[]] * 5, ["hang"] * 4 + ["4"]) for _ in range(16)]
        for future in futures:
            *hung, right = future.result(timeout=120)
            assert right == RIGHT
            assert hung == [Scored(None, "timeout")] * 4
        assert time.monotonic() - start < 4 * 8.0


def test_a_verifier_without_memory_says_nothing_of_the_response(pool: VerifierPool) -> None:
    assert score_texts(pool, "4", "memory", "4") == [RIGHT, Scored(None, "crash"), RIGHT]


@pytest.mark.parametrize("large", ["", "4" * 2**20], ids=["small row", "row that the socket does not hold"])
def test_a_stopped_fork_server_is_replaced(large: str) -> None:
    with VerifierPool(1, 5.0, score=score_by_text) as pool:
        score_texts(pool, "4")
        before = pool._cells._fork_server._process
        assert before is not None
        for pid in [before.pid, *children(before.pid)]:
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        assert score_texts(pool, "4") == [Scored(None, "timeout")]  # its scorer is stopped, too
        label = large or "4"
        assert pool.score_group("fake", label, [[1]], [label]) == [RIGHT]
        assert pool._cells._fork_server._process is not before
        assert time.monotonic() - start < 60


def test_a_process_that_cannot_be_started_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with VerifierPool(1, 5.0, score=score_by_text) as pool:
        [scored] = score_texts(pool, "4")
        assert scored.score is None
        assert scored.failure is not None
        assert "Cannot allocate memory" in scored.failure


@pytest.mark.parametrize("lacks", ["landlock_version", "has_filters"])
def test_a_kernel_without_a_part_of_the_jail_keeps_the_others(lacks: str) -> None:
    there = {"landlock_version": "has_filters", "has_filters": "landlock_version"}[lacks]
    with VerifierPool(1, 5.0, score=Lacking(lacks)) as pool:
        assert pool.score_group("fake", there, [[]], [""]) == [RIGHT]


def test_where_no_process_starts_nothing_is_scored_and_nothing_ends() -> None:
    with VerifierPool(1, 1, score=Unstartable()) as pool:
        result, other = score_texts(pool, "4", "5")
        assert (result.score, other.score) == (None, None)
        assert str(result.failure).startswith("unavailable: no process could be started: ")
        assert pool.counts == {"unavailable": 2}


@pytest.mark.parametrize(("num_workers", "timeout_s"), [(0, 1), (1, 0)])
def test_a_pool_needs_workers_and_time(num_workers: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="needs workers and time"):
        VerifierPool(num_workers, timeout_s)


def test_workers_are_light_and_do_not_import_the_parents_main_module() -> None:
    with VerifierPool(1, 30, score=score_environment) as pool:
        assert score_texts(pool, "4") == [RIGHT]


def test_the_workers_are_other_processes() -> None:
    with VerifierPool(1, 30, score=score_is_worker) as pool:
        assert pool.score_group("fake", os.getpid(), [[1]], [""]) == [Scored(0.0)]


def test_reasoning_gym_at_speed() -> None:
    """Measured 10,000 to 17,000 responses a second on one core; the bound leaves room for a busy machine."""
    rows = reasoning_gym_rows("reasoning_gym/chain_sum?size=16")
    with VerifierPool(2, 30, ready=["reasoning_gym/chain_sum"]) as pool:

        def score_all() -> list[list[Scored]]:
            futures = []
            for row in rows:
                answer = json.loads(row["ground_truth"])["answer"]
                texts = [f"<answer>{answer}</answer>"] * 7 + ["none"]
                futures.append(pool.submit(row["dataset"], row["ground_truth"], [[1] * 32] * 8, texts))
            return [future.result(timeout=60) for future in futures]

        seconds = []
        for _ in range(5):  # the first ones wait for a worker to start
            start = time.perf_counter()
            assert score_all() == [[RIGHT] * 7 + [Scored(0.0)]] * 16
            seconds.append(time.perf_counter() - start)
    assert 128 / min(seconds) > 1000


PARENT = """
import sys, time
from verifier_fakes import score_by_text
from open_instruct.verifiers.pool import VerifierPool
pool = VerifierPool(2, {timeout_s}, score=score_by_text)
for text in {texts}:
    pool.submit("fake", "4", [[1]] * 2, ["4", text])
time.sleep(3)
print("up", flush=True)
{then}
"""


def start_parent(then: str, *, texts: list[str], timeout_s: float = 1.0) -> tuple[subprocess.Popen, set[int]]:
    """A process with a pool that is busy with these texts, and the processes of the pool."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = PARENT.format(texts=texts, timeout_s=timeout_s, then=then)
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "up\n"
    return parent, workers(parent.pid)


@pytest.mark.parametrize("text", ["4", "hang", "hang_in_c"])
def test_everything_ends_when_the_parent_is_killed(text: str) -> None:
    """Also what hangs in C: the kernel sees to it."""
    parent, processes = start_parent("time.sleep(1000)", texts=[text] * 2, timeout_s=20.0)
    assert len(processes) == 3
    parent.kill()
    parent.wait(timeout=10)
    wait_for_end(processes, 5)


def test_a_pool_that_nobody_closed_does_not_keep_a_process() -> None:
    parent, processes = start_parent("", texts=["4"])
    assert parent.wait(timeout=20) == 0
    wait_for_end(processes, 5)
