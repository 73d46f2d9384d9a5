"""Programs that read and write, and functions of LiveCodeBench."""

import asyncio
import fcntl
import json
import os
import time
from typing import Any

import pytest

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers import code_runs
from open_instruct.verifiers.base import NotScored
from open_instruct.verifiers.code_runs import CodeRuns
from open_instruct.verifiers.code_verifiers import CodeStdioVerifier, same_output
from open_instruct.verifiers.registry import check_label

LIMIT_S = 2.0


def written(code: str, text: str = "", limit_s: float = LIMIT_S) -> str | None:
    async def run() -> str | None:
        processes = CodeRuns()
        try:
            return (await processes.run_stdio(code, [text], limit_s))[0][0]
        finally:
            processes.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("output", "target", "are_same"),
    [("1\n2\n", "1\n2", True), ("1 \n2", "1\n2", True), ("1 2", "1  2", True), ("", "\n", True), ("1", "1.5", False)],
)
def test_spaces_at_the_ends_do_not_count(output: str, target: str, are_same: bool) -> None:
    assert same_output(output, target) == are_same


@pytest.mark.parametrize(
    ("output", "target", "are_same"),
    [
        ("  1\n2  \n", "1\n2", True),
        ("3.0", "3", True),
        ("0.250 1e3 +7 -.5", "0.25 1000 7 -0.5", True),
        ("1  2\t3", "1 2 3", True),
        ("a  b", "a b", True),
        ("50000000000000001", "50000000000000000", False),
        ("3.0 a", "3 a", False),
        ("1 2", "12", False),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("nan", "NaN", False),
        ("1_0", "10", False),
        ("1e9999999999", "1e9999999999 ", True),
        ("٣", "3", False),
    ],
)
def test_outputs_are_compared_as_livecodebench_does(output: str, target: str, are_same: bool) -> None:
    assert same_output(output, target) == are_same


@pytest.mark.parametrize(
    ("code", "text", "output"),
    [
        ("def f(x: List[int]): return math.gcd(*x)\nprint(f(list(map(int, input().split()))))", "4 6", "2\n"),
        ("import atexit\nout = []\natexit.register(lambda: print(*out))\nout.append(1)", "", "1\n"),
        ("import atexit, sys\natexit.register(print, 2)\nsys.exit()", "", "2\n"),
        ("import atexit\natexit.register(lambda: 1 / 0)\nprint(3)", "", "3\n"),
        ("import os\nos.write(1, os.read(0, 10))\nprint('x')", "abc", "abcx\n"),
        ("import sys\nread = sys.stdin.buffer.readline\nprint(int(read()) + int(read()))", "1\n2\n", "3\n"),
        ("import io, os, sys\nsys.stdout = io.StringIO()\nprint(1)\nos.write(1, b'2')", "", "2"),
        ("import sys\nprint(sys.modules['__main__'].x if (x := 3) else 0)", "", "3\n"),
        ("print(len(input()))", "x" * 3_000_000, "3000000\n"),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass A:\n    x: int\nprint(A(1))",
            "",
            "A(x=1)\n",
        ),
    ],
)
def test_programs_run_as_with_livecodebench(code: str, text: str, output: str) -> None:
    assert written(code, text) == output


def test_too_much_output_fails() -> None:
    assert written("print('x' * 2**20)") is None


def test_a_flood_of_output_ends_before_its_time() -> None:
    started = time.monotonic()
    assert written("while True: print('x' * 10**6)", limit_s=60) is None
    assert time.monotonic() - started < 30


def small_pipe() -> tuple[int, int]:
    """What a user gets who has as much in pipes as the kernel allows."""
    reader, writer = pipe()
    set_size = 1031
    assert fcntl.fcntl(reader, set_size, 4096) == 4096
    return reader, writer


pipe = os.pipe


def test_a_small_pipe_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runs.os, "pipe", small_pipe)
    assert written("print(input() + 'x' * 500_000)", "y" * 400_000) == "y" * 400_000 + "x" * 500_000 + "\n"


def test_without_pipes_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pipe() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(code_runs.os, "pipe", no_pipe)
    with pytest.raises(NotScored, match="no input or output for a program"):
        written("print(1)")


def test_without_a_jail_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runs, "missing", lambda: ["Landlock is not there"])
    with pytest.raises(NotScored, match="no process for a program: Landlock is not there"):
        written("print(1)")


def test_runs_leave_no_files_open() -> None:
    written("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("print(1)", "while True: print('x' * 10**6)", "import os; os._exit(0)"):
        written(code)
    assert len(os.listdir("/proc/self/fd")) == before


# --- functions of LiveCodeBench ---------------------------------------------------------------------------------------


def called(code: str, *pairs: tuple[str, str], name: str = "total") -> list[bool]:
    tests = [
        {"input": arguments, "output": target, "testtype": "functional", "fn_name": name} for arguments, target in pairs
    ]
    verifier = CodeStdioVerifier(VerifierConfig())

    async def run() -> list[bool]:
        processes = CodeRuns()
        try:
            return [ok for ok, _ in await verifier.run(processes, code, verifier.tests_in(tests), LIMIT_S)]
        finally:
            processes.close()

    return asyncio.run(run())


def passed(code: str, *tests: str) -> list[bool]:
    async def run() -> list[bool]:
        processes = CodeRuns()
        try:
            return [result.passed for result in await processes.run_tests(code, tests, LIMIT_S)]
        finally:
            processes.close()

    return asyncio.run(run())


SOLUTION = "class Solution:\n    def total(self, x: List[int], n: int) -> int:\n        return sum(x) + n\n"


@pytest.mark.parametrize("code", [SOLUTION, "def total(x, n): return sum(x) + n"])
def test_functions_are_called(code: str) -> None:
    assert called(code, ("[1, 2]\n3", "6"), ("[]\n0", "1"), ("[1]\n2\n", "3")) == [True, False, True]


@pytest.mark.parametrize(
    ("result", "target", "is_right"),
    [
        ("(1, [(2, 3)])", "[1, [[2, 3]]]", True),
        ("{'a': None}", '{"a": null}', True),
        ("2.0", "2", True),
        ("10**20", "100000000000000000000", True),
        ("'é'", '"é"', True),
        ("{1: 2}", '{"1": 2}', False),
        ("{1, 2}", "[1, 2]", False),
        ("object()", "null", False),
        ("None", "0", False),
        ("1/0", "0", False),
        ("type('E', (), {'__eq__': lambda *a: True})()", "1", False),
        ("type('E', (int,), {'__eq__': lambda *a: True})()", "1", False),
        ("exit(0)", "0", False),
        ("range(3)", "[0, 1, 2]", False),
    ],
)
def test_results_of_functions_are_compared_as_json(result: str, target: str, is_right: bool) -> None:
    assert called(f"def total(x): return {result}", ("1", target)) == [is_right]


def test_a_function_that_hangs_costs_no_other() -> None:
    code = "import os\ndef total(x):\n    while x == 1: pass\n    if x == 2: os._exit(0)\n    return x"
    assert called(code, ("0", "0"), ("1", "1"), ("2", "2"), ("3", "3")) == [True, False, False, True]


def test_program_that_hangs_while_it_is_loaded_fails_all_tests_after_a_second_try() -> None:
    started = time.monotonic()
    assert called("while True: pass", *[("1", "1")] * 50) == [False] * 50
    assert called("import os; os._exit(0)", *[("1", "1")] * 50) == [False] * 50
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("num_tests", [1, 3])
def test_program_that_loads_at_the_second_try_has_lost_no_test(monkeypatch: pytest.MonkeyPatch, num_tests: int) -> None:
    """As on a machine that was busy for a moment."""
    ask, loads = code_runs.Child.ask, []

    async def busy_at_first(channel: Any, message: dict[str, Any], *rest: int) -> dict[str, Any]:
        if message.get("do") == "program" and not loads.append(message) and len(loads) in (1, 3):
            raise TimeoutError
        return await ask(channel, message, *rest)

    monkeypatch.setattr(code_runs.Child, "ask", busy_at_first)
    assert called(SOLUTION, *[("[1, 2]\n3", "6")] * num_tests) == [True] * num_tests
    assert passed(SOLUTION, *["assert Solution().total([1], 2) == 3"] * num_tests) == [True] * num_tests
    assert len(loads) == 4


def test_functions_that_are_not_there_are_wrong() -> None:
    assert called("x = 1", ("12\n18", "6"), name="gcd") == [False]
    assert called("class Solution: pass", ("12\n18", "6"), name="gcd") == [False]


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ({"input": "1", "output": "1", "testtype": "functional"}, "must say which function they call"),
        (
            {"input": "1", "output": "1", "testtype": "functional", "fn_name": "f(x)"},
            "must say which function they call",
        ),
        ({"input": "x", "output": "1", "fn_name": "f"}, "lines of JSON"),
        ({"input": "1", "output": "[", "fn_name": "f"}, "lines of JSON"),
    ],
)
def test_labels_without_a_function_are_refused(test: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_label("code_stdio", [test])


@pytest.mark.parametrize("metadata", [{"func_name": "total"}, json.dumps({"func_name": "total"}), {"fn_name": "total"}])
def test_the_function_may_be_in_the_metadata(metadata: object) -> None:
    tests = [
        {"input": "1", "output": "1", "testtype": "functional"},
        {"input": "2", "output": "2", "metadata": metadata},
    ]
    assert [test["fn_name"] for test in CodeStdioVerifier().tests_in(tests)] == ["total"] * 2


def test_tests_of_input_and_output_stay_what_they_are() -> None:
    tests = [{"input": "1", "output": "1", "testtype": "stdin", "metadata": "x"}]
    assert CodeStdioVerifier().tests_in(tests) == tests
