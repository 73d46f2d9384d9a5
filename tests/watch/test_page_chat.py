"""Questions to a model from the page: a real child answers, and nobody else may ask, nor while a run is running."""

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from made_records import TINY_MODEL, copy_of, make_record, shared_record

from open_instruct.watch import page_chat, server
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.page_chat import PageChat, read_request
from open_instruct.watch.runs import Runs
from open_instruct.watch.server import Guard, create_app, uvicorn_server

TOKEN = "token"
ANSWERED_S = 900.0
"""A child has the lowest priority, and waits long on a busy machine."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, with a model."""
    directory = copy_of(shared_record(), tmp_path / "out")
    shutil.copytree(TINY_MODEL, directory / "model")
    return directory


def body(message: str = "What is 2 + 3?", run: Any = 0) -> bytes:
    return json.dumps({"run": run, "message": message}).encode()


async def present() -> bool:
    return False


def children() -> list[psutil.Process]:
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # a child of another test that has ended, and that nobody has waited for
            children += [child] if "open_instruct.chat" in child.cmdline() else []
    return children


def test_a_model_answers_with_its_tokens(run: Path) -> None:
    answer = asyncio.run(PageChat(Runs([run]), deadline_s=ANSWERED_S).answer(body(), present))
    assert answer["model"] == str(run / "model")
    assert "What is 2 + 3?" in answer["prompt"]
    assert len(answer["tokens"]) == len(answer["token_texts"]) > 0
    assert answer["answer"].strip() in "".join(answer["token_texts"])
    assert children() == []


def test_a_child_that_takes_too_long_is_killed(run: Path) -> None:
    with pytest.raises(Mistake, match=r"not answered within 0.5 s.*python -m open_instruct.chat"):
        asyncio.run(PageChat(Runs([run]), deadline_s=0.5).answer(body(), present))
    gone_by = time.monotonic() + 20
    while children() and time.monotonic() < gone_by:
        time.sleep(0.1)
    assert [child for child in children() if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_child_for_whom_nobody_waits_is_killed_and_the_next_may_ask(run: Path) -> None:
    async def gone() -> bool:
        return True

    async def asks() -> None:
        chat = PageChat(Runs([run]))
        first = asyncio.create_task(chat.answer(body(), present))
        await asyncio.sleep(0.5)
        with pytest.raises(Mistake, match="answering already"):
            await chat.answer(body(), present)
        chat.close()
        with pytest.raises((Mistake, ValueError)):
            await first
        with pytest.raises(Mistake, match="nobody waits"):
            await chat.answer(body(), gone)

    asyncio.run(asks())
    assert [child for child in children() if child.status() != psutil.STATUS_ZOMBIE] == []


def test_no_model_is_loaded_beside_a_run_that_is_running(run: Path, tmp_path: Path) -> None:
    other = make_record(tmp_path / "runs" / "other", num_steps=1, end=None, is_resumed=False).directory
    lines = (other / "record" / "starts.jsonl").read_text()
    start = json.loads(lines.splitlines()[-1])
    start |= {"process": os.getpid(), "unix": time.time() + 10}
    (other / "record" / "starts.jsonl").write_text(json.dumps(start) + "\n")
    with pytest.raises(Mistake, match=r"other is running, and a model that is loaded here could take its memory"):
        asyncio.run(PageChat(Runs([run, other])).answer(body(), present))


def test_a_model_that_does_not_fit_is_not_loaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_chat, "MEMORY", 1e9)
    with pytest.raises(Mistake, match=r"the model needs about .* GiB of memory"):
        asyncio.run(PageChat(Runs([run])).answer(body(), present))


def test_a_run_without_a_model_says_so(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    with pytest.raises(Mistake, match=str(directory)):
        asyncio.run(PageChat(Runs([directory])).answer(body(), present))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"no json", "the body has to be JSON"),
        (b"[]", "the body has to be JSON"),
        (body(run="0"), "`run` has to be a number"),
        (body(" "), "not empty"),
        (body("x" * 20_001), "20,000 are the most"),
    ],
)
def test_a_request_of_another_form_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(Mistake, match=problem):
        read_request(content)


@contextmanager
def served(chat: PageChat | None) -> Iterator[str]:
    listener = server._listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    guard = Guard(TOKEN, f"watch_{port}", frozenset({"localhost"}))
    process = uvicorn_server(create_app(lambda *_: {}, lambda: 0, guard, chat=chat))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.should_exit = True
        thread.join(60)
        listener.close()


def test_only_the_page_itself_may_ask(run: Path) -> None:
    """Not without the token, not from another site's page, not with another method or at another path."""
    with served(PageChat(Runs([run]), deadline_s=ANSWERED_S)) as address:
        own, foreign = {"origin": address}, {"origin": "http://evil.example"}
        url = f"{address}/chat?token={TOKEN}"
        assert httpx.post(f"{address}/chat", content=body(), headers=own).status_code == 403
        for headers in (foreign, {}, {"origin": "null"}):
            assert httpx.post(url, content=body(), headers=headers).status_code == 405
        assert httpx.post(f"{address}/api/runs?token={TOKEN}", content=body(), headers=own).status_code == 405
        assert httpx.get(url, headers=own).status_code == 405
        assert httpx.post(url, content=b"x" * 300_000, headers=own).status_code == 413
        assert httpx.post(url, content=b"{}", headers=own).status_code == 400
        assert children() == []
        answer = httpx.post(url, content=body(), headers=own, timeout=ANSWERED_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["tokens"]
        assert httpx.post(url, content=body(run=7), headers=own).status_code == 400
    with served(None) as address:
        refused = httpx.post(f"{address}/chat?token={TOKEN}", content=body(), headers={"origin": address})
        assert refused.status_code == 400
        assert "shown to this machine alone" in refused.json()["problem"]
