"""Finding the program in a response."""

import pytest

from open_instruct.verifiers.code_blocks import program_in


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n``` and ```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>none", "none"),
        ("a = 1", "a = 1"),
        ("```python\na", "a\n"),
    ],
)
def test_the_last_block_is_the_program(response: str, found: str) -> None:
    assert program_in(response) == found


@pytest.mark.parametrize(
    ("response", "found"),
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
def test_fences_are_paired(response: str, found: str) -> None:
    assert program_in(response) == found


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "line", ["`" * 10**6, "`" * 10**6 + "x`", "~" * 10**6 + "`", " " * 10**6 + "```", "``` " * 10**5]
)
def test_fences_of_any_length_are_read_fast(line: str) -> None:
    program_in(f"{line}\n" * 3)
