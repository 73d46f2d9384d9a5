"""Right programs fail because of how they write."""

import asyncio
import contextlib
import io
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.code_verifiers import CodeStdioVerifier

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/Gym #2956",),
    subject="rewards",
    happened="Programs ran with a text buffer as their output, so `sys.stdout.buffer` was an error, and printing a whole "
    "number of more than 4,300 digits was one, too.",
    here="A program runs in a process of its own with real files as input and output, and without Python's limit on "
    "digits (`verifiers/code_programs.py`). Decimals must have the value that the label has, as in LiveCodeBench.",
)
OUTPUT = "1" + "0" * 5000
PROGRAMS = {
    "import sys\nsys.stdout.buffer.write(b'1' + b'0' * 5000)": 1.0,
    "print(10**5000)": 1.0,
    "print(str(10**4999) + '0')": 1.0,
    "print(10**5000 + 1)": 0.0,
}


def check(scores: Callable[[list[str]], list[float]]) -> None:
    assert scores(list(PROGRAMS)) == list(PROGRAMS.values())


def theirs(programs: list[str]) -> list[float]:
    def score(program: str) -> float:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                exec(program, {})
            except Exception:
                return 0.0
        return float(output.getvalue().strip() == OUTPUT)

    return [score(program) for program in programs]


def ours(programs: list[str]) -> list[float]:
    async def run() -> list[float]:
        verifier = CodeStdioVerifier()
        label = [{"input": "", "output": OUTPUT}]
        try:
            calls = [verifier.async_call([], f"```python\n{program}\n```", label) for program in programs]
            return [result.score for result in await asyncio.gather(*calls)]
        finally:
            await verifier.close()

    return asyncio.run(run())


def test_text_buffer_and_limit_of_digits_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_programs_write_as_they_like_here() -> None:
    check(ours)
