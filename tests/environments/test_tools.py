"""The tools that come with the project."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from open_instruct.environments import search
from open_instruct.environments.base import Environment, Observation, ToolCall, ToolError, Turn
from open_instruct.environments.calculator import calculate
from open_instruct.environments.python_tool import PythonTool
from open_instruct.environments.search import Search, SerperSearch, read_texts
from open_instruct.system.sandbox import missing


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 34", "46"),
        ("12*(3+4)^2/7 =", "84"),
        ("1/3 + 1/6", "0.5"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("2**200", str(2**200)),
        ("sqrt(2) * pi", "4.44288293816"),
        ("round(2.6) + gcd(12, 18)", "9"),
        ("1e3", "1000"),
        ("7 × 6 − 2", "40"),
        ("0.95^240", "4.50469373299e-06"),
        ("(1 + 0.05/365)^(365*30)", "4.48122868852"),
        ("(-1)^(10^9 + 1)", "-1"),
        ("(1/2)^300 * 2^300", "1"),
        ("1.001^0", "1"),
        ("0^500", "0"),
        ("round(2.567, 1)", "2.6"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "2+",
            "x + 1",
            "__import__('os')",
            "'a' * 3",
            "(1).__class__",
            "lambda: 1",
            "[1, 2]",
            "True + 1",
            "1 if 1 else 2",
        ),
        *(
            "1/0",
            "9**9**9",
            "10**1000000",
            "factorial(1000000)",
            "1" * 2000,
            "(" * 500 + ")" * 500,
            "sqrt(-1)",
            "1e999",
        ),
    ],
)
def test_what_is_no_arithmetic_is_the_models_fault(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    ["10**1000000", "9**9**9", "2.5**5000", "exp(1000)", "round(1, -10**9)", "round(1/3, 10**9)", "(3/2)**9999"],
)
def test_numbers_that_become_too_large_are_told_so_at_once(expression: str) -> None:
    with pytest.raises(ToolError, match="the numbers become too large"):
        calculate(expression)


def answer(tool: Environment, *calls: dict[str, Any]) -> list[str]:
    """What the tool says to calls with these arguments."""

    async def ask() -> Observation:
        return await tool.step(Turn("", tuple(ToolCall("tool", one) for one in calls)))

    return [str(message["content"]) for message in asyncio.run(ask()).messages]


@pytest.mark.skipif(bool(missing()), reason="this kernel has no jail")
def test_programs_run_in_the_jail() -> None:
    tool = PythonTool(timeout=1.0, memory_mb=2048)  # of which this process, which it is forked from, has a part
    code = "import os\nos.environ\nprint(6 * 7)"
    assert answer(tool, {"code": code}) == ["42\n"]
    said = answer(
        tool,
        {"code": "print('a')\n1/0"},
        {"code": "open('/etc/passwd')"},
        {"code": "open('/tmp/x', 'w')"},
        {"code": "import socket; socket.create_connection(('127.0.0.1', 1))"},
        {"code": "import subprocess; subprocess.run(['id'])"},
        {"code": "import os; os.kill(os.getppid(), 9)"},
        {"code": "x = [0] * 10**9"},
        {"code": "while True: pass"},
        {"code": "print('x' * 10**7)"},
        {"code": " "},
        {"code": "def f(:"},
        {"code": "print(input())"},
        {"code": "import os; os._exit(1)"},
    )
    place = 'File "<program>", line 2, in <module>'
    assert said[0] == f"a\nTraceback (most recent call last):\n  {place}\nZeroDivisionError: division by zero\n"
    for refused in said[1:6]:
        assert "Error" in refused
    assert "MemoryError" in said[6]
    assert said[7] == "Timeout after 1 seconds"
    assert said[8].endswith("[the output is longer than 65536 bytes]")
    assert said[9] == "Empty code. Please provide some code to execute."
    assert "SyntaxError" in said[10]
    assert "EOFError" in said[11]
    assert said[12] == ""


@pytest.mark.skipif(bool(missing()), reason="this kernel has no jail")
@pytest.mark.parametrize(
    ("code", "text", "num_errors"),
    [
        ("print(6 * 7)", "42\n", 0),
        ("print('a')\nraise ValueError('b')", "ValueError: b\n", 1),
        ("raise SystemExit", "", 0),
        ("import sys\nprint('a')\nsys.exit('b')", "a\nb\n", 1),
        ("exit(3)", "", 1),
        ("import sys\nprint('a', file=sys.stderr, end='')", "a", 0),
        ("import os\nprint('a', flush=True)\nos.kill(os.getpid(), 10)", "a\n\nEnded by SIGUSR1", 1),
        ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "", 0),
    ],
)
def test_a_program_that_ends_with_an_error_is_a_call_with_an_error(code: str, text: str, num_errors: int) -> None:
    tool = PythonTool(timeout=20.0, memory_mb=2048)
    said = asyncio.run(tool.step(Turn("", (ToolCall("python", {"code": code}),))))
    assert said.messages[0]["content"].endswith(text)
    assert said.num_errors == num_errors


def test_search_finds_the_text_with_the_rare_words(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    texts = ["the cat sat on the mat", "the dog ran to the park", "quantum cats are in two states", "a mat is a rug"]
    path.write_text("\n".join(json.dumps({"title": f"T{i}", "text": text}) for i, text in enumerate(texts)))
    tool = Search(str(path), num_results=2)
    assert answer(tool, {"query": "the cat"}) == ["T0\nthe cat sat on the mat\n\nT1\nthe dog ran to the park"]
    assert answer(tool, {"query": "Quantum?"}) == ["T2\nquantum cats are in two states"]
    assert answer(tool, {"query": "zebra"}, {"query": ""}) == [
        "Query returned no results.",
        "Empty query. Please provide a search query.",
    ]
    assert Search.problem({"index": str(tmp_path / "no")}).startswith("the index")
    assert Search.problem({"index": str(path)}) == ""


@pytest.mark.parametrize(
    ("row", "texts", "why"),
    [
        ('{"id": "0", "contents": "\\"Paris\\"\\nIts people"}', ['"Paris"\nIts people'], ""),
        ('{"title": "T", "text": ""}', ["T"], ""),
        ('{"id": "0", "body": "Paris"}', [], "line 2 has neither 'text' nor 'contents'; its keys are id, body"),
        ('"Paris"', [], "line 2 has neither 'text' nor 'contents'; it is \"Paris\""),
        ("Paris", [], "line 2 is no JSON: "),
    ],
)
def test_search_names_the_line_that_has_no_text(tmp_path: Path, row: str, texts: list[str], why: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "one"}}\n{row}\n')
    if not why:
        assert read_texts(str(path)) == ["one", *texts]
        assert Search.problem({"index": str(path)}) == ""
    assert why in Search.problem({"index": str(path)})


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_search_reads_texts_with_letters_that_end_lines_elsewhere(tmp_path: Path, letter: str) -> None:
    lines, rows = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    lines.write_text(f"one{letter}two\r\nthree\n\n", encoding="utf-8", newline="")
    assert read_texts(str(lines)) == [f"one{letter}two", "three"]
    written = (json.dumps({"text": f"{number}{letter}"}, ensure_ascii=False) for number in (1, 2))
    rows.write_text("\r\n".join(written), encoding="utf-8", newline="")
    assert read_texts(str(rows)) == [f"1{letter}", f"2{letter}"]
    assert Search.problem({"index": str(rows)}) == ""


def test_a_service_is_asked_as_it_wants_it_and_its_failures_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    assert SerperSearch.problem({}) == "set SERPER_API_KEY in the environment"
    monkeypatch.setenv("SERPER_API_KEY", "key")
    monkeypatch.setattr(search, "PAUSES_S", (0.2, 0.2))
    asked: list[Any] = []
    times: list[float] = []

    async def serve(request: web.Request) -> web.Response:
        asked.append((request.headers["X-API-KEY"], await request.json()))
        times.append(time.monotonic())
        if len(asked) == 1:
            return web.Response(status=429)  # it is asked again, and not at once
        if len(asked) == 3:
            return web.Response(status=403)
        if len(asked) == 4:
            return web.Response(status=451)
        found = {"answerBox": {"answer": "42"}, "organic": [{"title": "T", "snippet": "S", "link": "L"}]}
        return web.json_response(found)

    async def talk() -> None:
        app = web.Application()
        app.router.add_post("/search", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        tool = SerperSearch(base_url=f"http://127.0.0.1:{port}/search")
        try:
            said = await tool.step(Turn("", (ToolCall("search", {"query": "life"}),)))
            assert said.messages[0]["content"] == "**Direct Answer:** 42\n\n**T**\nS\nSource: L"
            with pytest.raises(Exception, match="403"):  # not a ToolError: the key is wrong, not the model
                await tool.call("search", {"query": "life"})
            with pytest.raises(ToolError, match="HTTP error: 451"):
                await tool.call("search", {"query": "life"})
        finally:
            await runner.cleanup()

    asyncio.run(talk())
    assert asked[0] == ("key", {"q": "life", "num": 5})
    assert len(asked) == 4
    assert times[1] - times[0] >= 0.2
