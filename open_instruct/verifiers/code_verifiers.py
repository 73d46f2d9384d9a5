"""Verifiers that run programs: `code` against tests in Python, `code_stdio` against inputs and outputs.

`code_blocks.py` finds the program in a response. It runs in the jail of `sandbox.py`, in a process that never holds the
expected results (`code_children.py`), or on a server (`--code_api_url`).
"""

import ast
import asyncio
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.system.counted import counted
from open_instruct.system.sandbox import missing
from open_instruct.verifiers.addresses import check_address, without_login
from open_instruct.verifiers.base import NotScored, VerificationResult, VerifierFunction
from open_instruct.verifiers.code_blocks import program_in
from open_instruct.verifiers.code_children import GRACE_S
from open_instruct.verifiers.code_choice import without_long_numbers
from open_instruct.verifiers.code_labels import calls_in, function_in, read_list, with_lines
from open_instruct.verifiers.code_runs import CodeRuns
from open_instruct.verifiers.thoughts import NEVER_ENDS, answer_part

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,6})?", re.ASCII)
MOST_TESTS = 1000
ATTEMPTS = 3
AS_JSON = {"Content-Type": "application/json"}
QUEUE_S = 1800.0
"""Seconds that a program may wait for its turn."""


class CodeVerifier(VerifierFunction):
    """The share of the tests that a program passes. Tests are written in Python, such as `assert f(2) == 4`."""

    name = "code"
    path = "test_program"
    """Path on the server, the same as on open-instruct's server."""

    def __init__(self, verifier_config: VerifierConfig | None = None) -> None:
        super().__init__(verifier_config=verifier_config)
        self._runs: WeakKeyDictionary[asyncio.AbstractEventLoop, CodeRuns] = WeakKeyDictionary()

    @property
    def outside_timeout_s(self) -> float:
        return QUEUE_S + MOST_TESTS * (self.verifier_config.code_max_execution_time + GRACE_S)

    async def async_call(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        tests = self.tests_in(label)
        answer = answer_part(prediction, query)
        if answer is None:
            return VerificationResult(0.0, reasoning=NEVER_ENDS)
        program = program_in(answer, is_script=self.runs_scripts(tests))
        if self.verifier_config.code_api_url:
            results = await self._ask(program, tests)
        else:
            results = await self.run(self.runs(), program, tests, self.verifier_config.code_max_execution_time)
        num_passed = sum(passed for passed, _ in results)
        return VerificationResult(
            self._score(results), reasoning=f"{num_passed} of {counted(len(results), 'test')} passed"
        )

    def tests_in(self, label: object) -> list[Any]:
        """The tests in a label. Raises `ValueError` if the label holds no tests."""
        tests = read_list(label)
        if not tests or len(tests) > MOST_TESTS or not all(isinstance(test, str) for test in tests):
            raise ValueError(
                f"a {self.name} ground truth must be a list of 1 to {MOST_TESTS} tests in Python, got {label!r:.80}"
            )
        for test in tests:
            try:
                ast.parse(without_long_numbers(test))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"a test of the ground truth is no Python ({error}): {test!r:.80}") from error
        return tests

    def runs_scripts(self, tests: list[Any]) -> bool:
        """Whether these tests look at what a program writes, and not at its functions."""
        return False

    async def run(self, runs: "CodeRuns", program: str, tests: list[Any], limit_s: float) -> list[tuple[bool, float]]:
        """For each test, whether it has passed, and the seconds that it took."""
        return [(result.passed, result.seconds) for result in await runs.run_tests(program, tests, limit_s)]

    def check_label(self, label: object) -> None:
        self.tests_in(label)
        self.prepare(self.name)

    def prepare(self, dataset: str) -> None:
        server = self.verifier_config.code_api_url
        if server:
            check_address(f"{self.name}: --code_api_url", server)
        elif reasons := missing():
            raise ValueError(
                f"{self.name} runs what a model wrote, and this machine has no jail for that: {'; '.join(reasons)}. Run on a "
                f"kernel that has them, or name a server with --code_api_url."
            )

    def runs(self) -> CodeRuns:
        """The runs of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._runs:
            self._runs[loop] = CodeRuns()
        return self._runs[loop]

    async def close(self) -> None:
        runs = self._runs.pop(asyncio.get_running_loop(), None)
        if runs is not None:
            runs.close()

    def _score(self, results: Sequence[tuple[bool, float]]) -> float:
        limit = self.verifier_config.code_max_execution_time
        share = sum(passed for passed, _ in results) / len(results)
        if share < self.verifier_config.code_pass_rate_reward_threshold:
            return 0.0
        if not self.verifier_config.code_apply_perf_penalty:
            return share
        return sum(max(1 - seconds / limit, 0.0) for passed, seconds in results if passed) / len(results)

    async def _ask(self, program: str, tests: list[Any]) -> list[tuple[bool, float]]:
        """Have a server run the tests. Raises `NotScored` if the server cannot be reached or answers nonsense."""
        base = str(self.verifier_config.code_api_url).rstrip("/").removesuffix("_stdio").removesuffix("/test_program")
        limit = self.verifier_config.code_max_execution_time
        try:
            body = json.dumps({"program": program, "tests": tests, "max_execution_time": limit})
        except ValueError as error:  # Python writes no number of over 4,300 digits
            raise NotScored(f"a test cannot be sent to the server of programs ({error})") from error
        problem = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(attempt)
            try:
                timeout = aiohttp.ClientTimeout(total=60 + len(tests) * (limit + GRACE_S))
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    session.post(f"{base}/{self.path}", data=body, headers=AS_JSON) as answer,
                ):
                    problem = f"the server of programs answers with HTTP status {answer.status}"
                    if answer.status == 200:
                        return _results_in(await answer.json(content_type=None), len(tests))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = f"the server of programs at {without_login(base)} cannot be reached ({type(error).__name__})"
        raise NotScored(problem)


class CodeStdioVerifier(CodeVerifier):
    """The share of the inputs to which a program writes the right output.

    Tests that name a function (`fn_name`, or `testtype` `functional` in rows of LiveCodeBench) call it: `code_labels.py`.
    """

    name = "code_stdio"
    path = "test_program_stdio"

    def tests_in(self, label: object) -> list[Any]:
        tests = read_list(label)
        has_tests = tests and len(tests) <= MOST_TESTS
        if not has_tests or not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            raise ValueError(f"a code_stdio ground truth must be a list of {{input, output}}, got {label!r:.80}")
        if not any(
            test.get("testtype", "functional" if test.get("fn_name") else "stdin") == "functional" for test in tests
        ):
            return [with_lines(test) for test in tests]
        function = function_in(tests)
        calls_in(tests)
        return [{**test, "testtype": "functional", "fn_name": function} for test in tests]

    def runs_scripts(self, tests: list[Any]) -> bool:
        return tests[0].get("testtype") != "functional"

    async def run(self, runs: "CodeRuns", program: str, tests: list[Any], limit_s: float) -> list[tuple[bool, float]]:
        if not self.runs_scripts(tests):
            calls = calls_in(tests)
            answers = await runs.run_calls(program, tests[0]["fn_name"], [call.arguments for call in calls], limit_s)
            return [
                (any(bool(answer.value == result) for result in call.results), answer.seconds)
                for answer, call in zip(answers, calls, strict=True)
            ]
        outputs = await runs.run_stdio(program, [test["input"] for test in tests], limit_s)
        return [
            (output is not None and same_output(output, test["output"]), seconds)
            for (output, seconds), test in zip(outputs, tests, strict=True)
        ]


def same_output(output: str, target: str) -> bool:
    """Whether two outputs are equal line by line, without spaces around lines and empty lines around the text. As in
    LiveCodeBench and open-instruct, a line of numbers may write them differently (3.0 for 3)."""
    lines, target_lines = ([line.split() for line in text.strip().split("\n")] for text in (output, target))
    return len(lines) == len(target_lines) and all(map(_same_line, lines, target_lines))


def _same_line(words: list[str], target_words: list[str]) -> bool:
    if words == target_words:
        return True
    are_numbers = len(words) == len(target_words) and all(_NUMBER.fullmatch(word) for word in (*words, *target_words))
    return are_numbers and list(map(Decimal, words)) == list(map(Decimal, target_words))


def _results_in(answer: object, number: int) -> list[tuple[bool, float]]:
    results = answer.get("results") if isinstance(answer, dict) else None
    runtimes = answer.get("runtimes") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != number:
        raise NotScored("the server of programs answers with no results")
    if not isinstance(runtimes, list) or len(runtimes) != number:
        runtimes = [0.0] * number
    return [(result in (1, True), float(seconds)) for result, seconds in zip(results, runtimes, strict=True)]
