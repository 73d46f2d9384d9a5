"""The server tells nothing without its token, reads only, and answers in time."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_records import MadeRecord, make_record
from starlette.requests import Request
from starlette.testclient import TestClient

from open_instruct.watch import server, views
from open_instruct.watch.caches import stamp_of
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.server import PAGE, Guard, create_app, signature_of, uvicorn_server

TOKEN = "a-token-of-22-letters-"
GUARD = Guard(TOKEN, "watch_1", frozenset({"localhost"}))
ADDRESS = "http://127.0.0.1:1"
WAIT_S = 60.0
EXAMPLES: dict[str, dict[str, str]] = {
    "runs": {},
    "options": {},
    "curves": {},
    "step": {"step": "4", "sort": "worst", "limit": "3"},
    "group": {"step": "4", "prompt_id": "train-16"},
    "sample": {"step": "4", "prompt_id": "train-16", "sample": "3"},
    "tokens": {"step": "4"},
    "why": {"prompt_id": "train-16"},
    "row": {"row": "data/train.jsonl line 7"},
    "search": {"text": "answer"},
    "export_rows": {"step": "4"},
    "evaluations": {},
    "evaluation": {"version": "5", "set": "plus"},
    "evaluation_sample": {"version": "5", "set": "plus", "prompt_id": "eval-5-0", "sample": "1"},
    "flips": {"set": "plus", "version": "0", "other": "5"},
    "lanes": {},
    "conversations": {"step": "4"},
    "staleness": {"step": "4"},
    "cost": {},
    "health": {},
}


def answer(name: str, arguments: Mapping[str, str]) -> Any:
    """A view that is always there."""
    return {"view": name, "arguments": dict(arguments)}


@contextmanager
def client_of(
    view: Callable[..., Any] = answer, *, deadline_s: float = WAIT_S, cookie: bool = True
) -> Iterator[TestClient]:
    app = create_app(view, lambda: 0, GUARD, deadline_s=deadline_s)
    with TestClient(app, ADDRESS, follow_redirects=False, cookies={"watch_1": TOKEN} if cookie else None) as client:
        yield client


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Has the token."""
    with client_of() as client:
        yield client


@pytest.fixture
def stranger() -> Iterator[TestClient]:
    """Has no token."""
    with client_of(cookie=False) as client:
        yield client


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRecord:
    return make_record(tmp_path_factory.mktemp("run") / "made")


# --- token and host ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/none", "/api/runs", "/api/none", "/events", "/none"])
def test_every_path_answers_the_same_without_the_token(stranger: TestClient, path: str, method: str) -> None:
    response = stranger.request(method, path)
    assert response.status_code == 403
    assert response.text in ("Forbidden: use the address that the program printed.\n", "")
    assert set(response.headers) == {name.lower() for name in server.HEADERS} | {"content-length", "content-type"}


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN[:-1] + "x", TOKEN + "x", "é" * 22, "\udc80"])
def test_a_wrong_token_is_refused(stranger: TestClient, token: str) -> None:
    assert stranger.get("/", params={"token": token.encode(errors="replace").decode()}).status_code == 403
    assert stranger.get("/", headers={b"cookie": f"watch_1={token}".encode(errors="replace")}).status_code == 403


def test_a_cookie_of_another_port_is_not_the_token(stranger: TestClient) -> None:
    assert stranger.get("/", headers={"cookie": f"watch_2={TOKEN}"}).status_code == 403


def test_the_url_s_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    response = stranger.get("/", params={"token": TOKEN})
    assert (response.status_code, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"watch_1={TOKEN};")
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert stranger.get("/").status_code == 200  # with the cookie


def test_a_program_may_give_the_token_with_each_request(stranger: TestClient) -> None:
    response = stranger.get("/api/runs", params={"token": TOKEN, "run": "0"})
    assert response.status_code == 200
    assert response.json()["arguments"] == {"run": "0"}, "the token is no argument of a view"


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:1", "LOCALHOST", "[::1]:1", "192.168.0.7:1"])
def test_an_address_and_a_name_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:1", "[evil]:1", ""])
def test_a_foreign_name_is_refused_even_with_the_token(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


def test_names_of_this_machine_count_only_if_other_hosts_were_asked_for() -> None:
    assert server._names_of("127.0.0.1") == {"localhost", "127.0.0.1"}
    assert server._names_of("0.0.0.0") >= {"localhost", "0.0.0.0", server.socket.gethostname().lower()}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_only_get_is_answered(client: TestClient, method: str) -> None:
    response = client.request(method, "/api/runs")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/none", "/api/runs", "/none"])
def test_head_is_answered_as_get_without_a_body(client: TestClient, path: str) -> None:
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.headers, head.content) == (whole.status_code, whole.headers, b"")


def test_head_of_the_events_ends(client: TestClient) -> None:
    head = client.head("/events")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


# --- page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/api/runs", "/none"])
def test_every_answer_forbids_scripts_that_are_not_the_page_s_own(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(path.name for path in PAGE.iterdir()))
def test_a_file_of_the_page_has_its_type(client: TestClient, name: str) -> None:
    response = client.get(f"/page/{name}")
    assert response.content == (PAGE / name).read_bytes()
    assert response.headers["content-type"] == server.KINDS[Path(name).suffix]


@pytest.mark.parametrize(
    "name", ["../server.py", "..%2fserver.py", "%2e%2e/server.py", "server.py", "", ".", "/etc/passwd"]
)
def test_no_path_leads_out_of_the_page_s_folder(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_a_name_that_is_a_path_is_no_file_of_the_page() -> None:
    request = Request({"type": "http", "path_params": {"name": "../server.py"}})
    assert asyncio.run(server.page_file(request)).status_code == 404


def test_the_page_has_no_script_or_style_in_its_markup() -> None:
    markup = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\bstyle=", markup) == []


@pytest.mark.parametrize("path", sorted(PAGE.glob("*.js")), ids=lambda path: path.name)
def test_no_module_of_the_page_makes_markup_of_text(path: Path) -> None:
    if path.name != "uPlot.js":  # it draws on a canvas; its title and legend, which would, are not used
        sinks = r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|ContextualFragment"
        assert re.findall(sinks, path.read_text()) == []


# --- views ------------------------------------------------------------------------------------------------------------


def test_every_view_is_answered_as_the_command_line_answers_it(made: MadeRecord) -> None:
    assert EXAMPLES.keys() == views.VIEWS.keys(), "each view has an example here"
    runs = Runs([made.directory])
    with client_of(partial(views.answer, runs)) as client:
        for name, arguments in EXAMPLES.items():
            response = client.get(f"/api/{name}", params=arguments)
            assert response.status_code == 200, f"{name}: {response.text}"
            assert response.json() == json.loads(json.dumps(views.answer(runs, name, arguments))), name


def test_views_change_no_file_of_the_run(made: MadeRecord) -> None:
    files = {path: stamp_of(path) for path in made.directory.rglob("*")}
    runs = Runs([made.directory])
    for name, arguments in EXAMPLES.items():
        views.answer(runs, name, arguments)
    assert {path: stamp_of(path) for path in made.directory.rglob("*")} == files


@pytest.mark.parametrize(
    ("name", "arguments"), [("step", {"step": "99"}), ("step", {}), ("none", {}), ("step", {"step": "x"})]
)
def test_a_mistake_is_answered_with_its_sentence(made: MadeRecord, name: str, arguments: dict[str, str]) -> None:
    runs = Runs([made.directory])
    with client_of(partial(views.answer, runs)) as client:
        response = client.get(f"/api/{name}", params=arguments)
    with pytest.raises(Mistake) as mistake:
        views.answer(runs, name, arguments)
    assert (response.status_code, response.json()) == (400, {"problem": str(mistake.value)})


def test_a_view_that_breaks_takes_down_no_other() -> None:
    def view(name: str, _: Mapping[str, str]) -> Any:
        return 1 // (name != "breaks")

    with client_of(view) as client:
        response = client.get("/api/breaks")
        assert (response.status_code, client.get("/api/works").json()) == (500, 1)
        assert "ZeroDivisionError" in response.json()["problem"]


def test_a_lone_surrogate_of_a_file_is_answered() -> None:
    with client_of(lambda *_: "a\udc80b") as client:
        assert client.get("/api/x").json() == "a?b"


def test_a_view_that_is_stuck_ends_at_its_deadline_and_others_are_answered() -> None:
    release = threading.Event()

    def view(name: str, _: Mapping[str, str]) -> Any:
        return release.wait(WAIT_S) if name == "stuck" else name

    try:
        with client_of(view, deadline_s=0.2) as client:
            response = client.get("/api/stuck")
            assert response.status_code == 504
            assert "stuck took longer than 0.2 s" in response.json()["problem"]
            assert client.get("/api/other").json() == "other"
    finally:
        release.set()


def test_more_questions_than_the_pool_holds_are_refused_at_once_until_it_is_free() -> None:
    release = threading.Event()
    with client_of(lambda *_: release.wait(WAIT_S), deadline_s=0.05) as client:
        statuses = [client.get("/api/stuck").status_code for _ in range(server.WORKERS + server.MOST_WAITING + 1)]
        assert statuses == [504] * (len(statuses) - 1) + [503]
        release.set()
        deadline = time.monotonic() + WAIT_S
        while (status := client.get("/api/stuck").status_code) != 200:
            assert status == 503 or status == 504
            assert time.monotonic() < deadline


# --- changes ----------------------------------------------------------------------------------------------------------


@contextmanager
def running(view: Callable[..., Any], signature: Callable[[], object]) -> Iterator[str]:
    """A server on a port of its own. Gives its address."""
    listener = server._listen("127.0.0.1", 0)
    process = uvicorn_server(create_app(view, signature, GUARD, changes_s=0.02))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        process.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()


def test_a_listener_hears_of_each_change_and_of_nothing_else() -> None:
    numbers = [0]
    with (
        running(answer, lambda: numbers[0]) as address,
        httpx.stream("GET", f"{address}/events", params={"token": TOKEN}, timeout=WAIT_S) as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        numbers_of_events = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        assert next(numbers_of_events) == "0", "hello"
        time.sleep(0.2)  # several looks at files that are the same
        for change in ("1", "2"):
            numbers[0] += 1
            assert next(numbers_of_events) == change


def test_files_that_stay_the_same_are_told_to_nobody() -> None:
    looks = [0]

    def signature() -> object:
        looks[0] += 1
        return "the same"

    async def listen() -> None:
        changes = server.Changes(signature, every_s=0.001)
        task = asyncio.create_task(changes.watch())
        stream = changes.stream()
        assert (await anext(stream))["event"] == "hello"
        change = asyncio.ensure_future(anext(stream))
        while looks[0] < 5:
            await asyncio.sleep(0.001)
        assert not change.done()
        changes.end()
        with pytest.raises(StopAsyncIteration):
            await change
        task.cancel()
        changes.close()

    asyncio.run(asyncio.wait_for(listen(), WAIT_S))


def test_files_that_views_read_change_the_signature(made: MadeRecord, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    directory = make_record(folder / "made", num_steps=2, end=None, is_resumed=False).directory
    runs = Runs([folder])
    before = signature_of(runs)
    assert signature_of(runs) == before
    for path in ("metrics.jsonl", "record/events.jsonl", "record/open/000003.log", "prompts.jsonl"):
        with open(directory / path, "ab") as file:
            file.write(b"\n")
        after = signature_of(runs)
        assert after != before, path
        before = after
    (directory / "record/steps/000009.parquet").write_bytes(b"")
    assert signature_of(runs) != before
    before = signature_of(runs)
    make_record(folder / "new", num_steps=1, is_resumed=False)
    assert signature_of(runs) != before


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_command_prints_its_url_once_serves_and_ends_by_ctrl_c(made: MadeRecord) -> None:
    command = [sys.executable, "-m", "open_instruct.watch", str(made.directory), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", url)
        with httpx.Client(follow_redirects=True) as browser:
            assert "<title>" in browser.get(url).text
            runs = browser.get(httpx.URL(url).join("/api/runs")).json()
        assert runs[0]["name"] == "made"
        assert httpx.get(httpx.URL(url).join("/")).status_code == 403
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, rest, errors) == (0, "", "")
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_named() -> None:
    with server._listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Mistake, match=rf"cannot listen on 127.0.0.1 port {port}: .*Give another --port"):
            server._listen("127.0.0.1", port)


def test_the_server_needs_neither_ray_nor_torch() -> None:
    code = "import sys, open_instruct.watch.server; print([m for m in ('ray', 'vllm', 'torch') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert result.stdout.strip() == "[]"
