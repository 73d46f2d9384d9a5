"""Finding the program in a response."""

import pytest

from open_instruct.verifiers.code_blocks import program_in


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n``` and ```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>none", "none"),
        ("a = 1", "a = 1"),
        ("```python\na", "a\n"),
    ],
)
def test_the_last_block_is_the_program(response: str, program: str) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```bash\npip install x\n```\nThen:\n```python\na = 1\n```\n", "a = 1\n"),
        ("```python\na = 1\n```\nRun it:\n```bash\npython a.py\n```\n", "a = 1\n"),
        ("```text\n1 2\n```\nNow\n```\na = 1\n```", "a = 1\n"),
        ("```python title=a.py\na = 1\n```", "a = 1\n"),
        ("```{.python .numbered}\na = 1\n```", "a = 1\n"),
        ("```Python3\r\na = 1\r\nb = 2\r\n```\r\n", "a = 1\nb = 2\n"),
        ("~~~python\na = 1\n~~~", "a = 1\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        (
            '```python\ndef f():\n    """\n    ```python\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```python\n    f()\n    ```\n    """\n',
        ),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("Here: ```python\na = 1\n```", "a = 1\n"),
        ("Use ```f(x)``` so:\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1```\nand\n```python\nb = 2```", "b = 2\n"),
        ("```python\na = 1\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n``` done.\nBye", "a = 1\n"),
        ("```cpp\nint a;\n```\n```java\nint b;\n```", "int b;\n"),
        ("```python\na = 1\n```\nBetter:\n```python\nb = ", "a = 1\n"),
        ("```python\na = 1\nb = 2", "a = 1\nb = 2\n"),
        ("```\npython\nprint(1)\n```", "print(1)\n"),
        ("```\n Python3 \nprint(1)\n```", "print(1)\n"),
        ("```\npy\n```", ""),
        ("```python\npython\n```", "python\n"),
        ("```\npython = 1\nprint(python)\n```", "python = 1\nprint(python)\n"),
        ("- So:\n  ```\n  python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("```\nprint(1)\npython\n```", "print(1)\npython\n"),
        ("```pyramid\nx\n```\n```python3.11\na = 1\n```\n```python-repl\n>>> a\n```", "a = 1\n"),
    ],
)
def test_fences_are_paired(response: str, program: str) -> None:
    assert program_in(response) == program


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "line", ["`" * 10**6, "`" * 10**6 + "x`", "~" * 10**6 + "`", " " * 10**6 + "```", "``` " * 10**5]
)
def test_fences_of_any_length_are_read_fast(line: str) -> None:
    program_in(f"{line}\n" * 3)


F, G = "def f(x):\n    return 2 * x\n", "def g(x):\n    return f(x) + 1\n"
READS = "n = int(input())\nprint(n * 2)\n"


def response_of(*blocks: str) -> str:
    """A response with these blocks of code. A block may begin with the name of its language and a `|`."""
    parts = []
    for block in blocks:
        language, mark, code = block.partition("|")
        parts.append(f"So:\n```{language if mark else 'python'}\n{code if mark else block}\n```\n")
    return "".join(parts)


@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize(
    "output",
    [
        *(
            "3",
            "3\n5",
            "3 5",
            "1 2 3",
            "Hello",
            "Hello, World",
            "[1, 2]",
            "{'a': 1}",
            "True",
            "-1.5",
            "'ab'",
            "Total: 3",
            "1 + 2",
            "result = 3",
            "result = [1, 2]\ncount: int = -2",
            "a, b = 1, 2\nOutput: 3",
            "MOD = 10**9 + 7",
        ),
        *(
            "# 3",
            "",
            "python solution.py < in.txt",
            "$ python a.py\n3",
            ">>> f(2)\n4",
            "Traceback (most recent call last):\n  x",
        ),
    ],
)
@pytest.mark.parametrize("language", ["|", "python|"])
def test_output_behind_the_program_is_no_program(output: str, language: str, is_script: bool) -> None:
    assert program_in(response_of(READS, language + output), is_script=is_script) == READS + "\n"


@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize("output", ["result = 3", "output = 'ab'", "nums = [2, 7]\ntarget = 9"])
def test_named_output_behind_a_function_is_no_program(output: str, is_script: bool) -> None:
    assert program_in(response_of(F, output), is_script=is_script) == F + "\n"
    assert program_in(response_of("a = 1", "a = 1\n"), is_script=is_script) == "a = 1\n\n"  # there is nothing else


@pytest.mark.parametrize("behind", ["for i in range(3): pass", "import math", "x = [n for n in range(3)]", F])
def test_a_script_is_the_last_block_that_reads_or_writes(behind: str) -> None:
    assert program_in(response_of(READS, behind), is_script=True) == READS + "\n"
    solve = "def solve():\n    print(int(input()) * 2)"
    assert program_in(response_of("print(1)", solve, "solve()"), is_script=True) == f"{solve}\n\nsolve()\n"


def test_a_program_with_functions_is_the_last_block_that_defines_some() -> None:
    assert program_in(response_of(F, "for i in range(3): pass")) == F + "\n"
    assert program_in(response_of(F, "print(4)")) == F + "\n"
    assert program_in(response_of(F, "import math")) == F + "\n"


@pytest.mark.parametrize(
    "demonstration",
    [
        "print(f(2))",
        "assert f(2) == 4",
        "f(2)",
        "x = [1, 2]\nfor n in x:\n    print(f(n))",
        "import sys\nprint(f(3), file=sys.stderr)",
        "if __name__ == '__main__':\n    print(f(2))",
        "|f(2) == 4",
    ],
)
def test_demonstration_of_a_function_is_no_program(demonstration: str) -> None:
    assert program_in(response_of(F, demonstration)) == F + "\n"
    assert program_in(response_of(F, demonstration, "|4")) == F + "\n"
    assert program_in(response_of("def f(x):\n    return 0", F, demonstration)) == F + "\n"


def names_of(program: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(program, names)
    return names


@pytest.mark.parametrize(
    "blocks",
    [
        (F, G),
        (F, G, "print(g(2))"),
        (F, "import math", G, "print(f(2), g(2))"),
        (G, F, "print(g(2))"),
        (F, "def g(x):\n    return 0", G, "print(g(2))"),
        ("from fractions import Fraction as Share", F, "def g(x):\n    return int(Share(f(x) + 1))", "g(1)"),
        ("ONE = 1", F, "def g(x):\n    return f(x) + ONE"),
    ],
)
def test_program_is_the_definitions_and_what_they_need(blocks: tuple[str, ...]) -> None:
    program = program_in(response_of(*blocks))
    assert names_of(program)["g"](2) == 5  # type: ignore[operator]
    assert "print" not in program


def test_script_that_calls_a_function_of_an_earlier_block_is_run_with_it() -> None:
    solve, call = "import sys\nsys.setrecursionlimit(9999)\ndef solve():\n    print(int(input()) * 2)", "solve()"
    assert program_in(response_of(solve, call), is_script=True) == f"{solve}\n\n{call}\n"
    whole = f"{solve}\nsolve()"
    assert program_in(response_of(whole, call), is_script=True) == f"{whole}\n"
    assert program_in(response_of(whole, "print(solve())"), is_script=False) == f"{whole}\n"


@pytest.mark.parametrize("is_script", [True, False])
def test_last_of_several_programs_counts(is_script: bool) -> None:
    better = "def f(x):\n    return 3 * x"
    assert program_in(response_of(F, better), is_script=is_script) == better + "\n"
    assert program_in(response_of("print(4)", "|print(3)"), is_script=is_script) == "print(3)\n"
    assert program_in(response_of(READS, "print(3)"), is_script=is_script) == "print(3)\n"
    assert program_in(response_of("print(1 +", "x ="), is_script=is_script) == "x =\n"
    assert program_in(response_of("print(1)", "print(1 +"), is_script=is_script) == "print(1)\n"


def test_long_numbers_belong_to_a_program() -> None:
    program = f"def f():\n    return {'7' * 5000}\n"
    assert program_in(response_of(program, "print(f())")) == program + "\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["a\n", "a.", "-", "(", "if a:\n", "def f(): pass\n", '"\\d"\n'])
def test_blocks_of_any_kind_are_read_fast(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    program_in(response_of("f = 1", *part * (200_000 // len(part)), *[part * (10_000 // len(part))] * 5))
    assert capsys.readouterr().err == ""
