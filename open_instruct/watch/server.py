"""The server of the page: answers GET and HEAD, and one POST, and only who knows the token of its URL.

    GET /                    the page; with ?token=… it sets a cookie and sends the browser on, so that no history holds the token
    GET /page/<file>         its scripts, styles and nothing else
    GET /api/<view>?<arguments>   a view (`open_instruct.watch.views`) as JSON
    POST /chat               a question to the model of a run that has ended (`open_instruct.watch.page_chat`)
    GET /events              server-sent events: `change` when a file that the views read has changed

It reads files, writes none, and is a process of its own: it can neither slow nor stop a run. Without the token every path answers
403 and tells nothing. A name in the Host header that is not this machine's is refused too, because a page of another site could
have let its own name point here (DNS rebinding).
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from open_instruct.record.places import RECORD
from open_instruct.watch import views
from open_instruct.watch.caches import stamp_of
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.page_chat import PageChat
from open_instruct.watch.runs import Runs

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PORT = 8420
CHAT = "/chat"
LARGEST_BODY = 200_000
"""Bytes of a question."""
DEADLINE_S = 30.0
"""For one view. A view that takes longer answers 504."""
CHANGES_S = 1.0
"""Seconds between two looks at the files."""
WORKERS = 2
MOST_WAITING = 16
"""Views that wait for a worker. More answer 503 at once."""
FORBIDDEN = "Forbidden: use the address that the program printed.\n"
PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


Answer = Callable[[str, Mapping[str, str]], Any]
"""The JSON value of a view with these arguments. Raises `Mistake`, whose sentence is answered, for what a user can correct."""
Signature = Callable[[], object]
"""Equal as long as the files that views read are the same."""


@dataclass(frozen=True)
class Guard:
    """Lets a request through if it has the token and names this machine."""

    token: str
    cookie: str
    hosts: frozenset[str]

    def names_this_machine(self, host_header: str) -> bool:
        """Whether the Host header is an address, or a name of this machine."""
        host = _without_port(host_header)
        return host in self.hosts or _is_address(host)

    def has_token(self, cookies: str, query: str) -> bool:
        """Whether the cookie or the URL has the token."""
        return self._equals(self._of_cookie(cookies)) or self._equals(_token_of(query))

    def _of_cookie(self, cookies: str) -> str:
        try:
            morsel = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return ""
        return morsel.value if morsel else ""

    def _equals(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())


class GuardedApp:
    """The application behind its guard. Every answer has the headers of `HEADERS`.

    `end` ends the answers that have no end of their own.
    """

    def __init__(self, app: ASGIApp, guard: Guard, end: Callable[[], None]) -> None:
        self._app = app
        self._guard = guard
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # a web socket: closed before it opens
            return await send({"type": "websocket.close", "code": 1008})

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in present)]
            await send(message)

        headers = Headers(scope=scope)
        query = scope["query_string"].decode("latin-1")
        is_known = self._guard.has_token(headers.get("cookie", ""), query)
        if not (self._guard.names_this_machine(headers.get("host", "")) and is_known):
            response: ASGIApp = PlainTextResponse(FORBIDDEN, 403)
        elif scope["method"] == "POST" and scope["path"] == CHAT and _is_of_page(headers):
            response = self._app
        elif scope["method"] not in ("GET", "HEAD"):
            response = PlainTextResponse("This page only reads: GET\n", 405, {"Allow": "GET, HEAD"})
        elif scope["method"] == "HEAD" and scope["path"] == "/events":
            response = PlainTextResponse("", media_type="text/event-stream")  # the stream itself has no end
        elif _token_of(query) and scope["path"] == "/":
            response = self._with_cookie()
        else:
            response = self._app
        is_head = scope["method"] == "HEAD"
        await response(
            {**scope, "method": "GET"} if is_head else scope,
            receive,
            _without_body(send_with_headers) if is_head else send_with_headers,
        )

    def _with_cookie(self) -> Response:
        response = RedirectResponse("/", 303)
        response.set_cookie(self._guard.cookie, self._guard.token, httponly=True, samesite="strict")
        return response


def _is_of_page(headers: Headers) -> bool:
    """Whether a page of this server sends the request: another site's page names another origin."""
    origin = headers.get("origin", "")
    return bool(origin) and origin.partition("://")[2].lower() == headers.get("host", "").lower()


def _without_body(send: Send) -> Send:
    """Sends what an answer says of itself, and not the answer."""

    async def send_head(message: Any) -> None:
        await send(message | {"body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def create_app(
    answer: Answer,
    signature: Signature,
    guard: Guard,
    *,
    chat: PageChat | None = None,
    deadline_s: float = DEADLINE_S,
    changes_s: float = CHANGES_S,
) -> GuardedApp:
    """The whole application. `chat`: answers questions to models; None: nobody may ask."""
    pool = ViewPool(answer, deadline_s=deadline_s)
    changes = Changes(signature, every_s=changes_s)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(changes.watch())
        try:
            yield
        finally:
            task.cancel()
            changes.close()
            pool.close()
            if chat is not None:
                chat.close()

    async def api(request: Request) -> Response:
        arguments = {name: value for name, value in request.query_params.items() if name != "token"}
        return await pool.answer(request.path_params["view"], arguments)

    async def ask(request: Request) -> Response:
        if chat is None:
            return _problem(400, "Models answer only on a page that is shown to this machine alone.")
        body = bytearray()
        async for chunk in request.stream():
            if len(body := body + chunk) > LARGEST_BODY:
                return _problem(413, f"A question has at most {LARGEST_BODY:,} bytes.")
        try:
            value = await chat.answer(bytes(body), request.is_disconnected)
        except Mistake as error:
            return _problem(400, str(error))
        return Response(json.dumps(value).encode(errors="replace"), media_type="application/json")

    async def events(_: Request) -> Response:
        return EventSourceResponse(changes.stream(), ping=15)

    routes = [
        Route("/", page_file),
        Route("/page/{name}", page_file),
        Route("/api/{view}", api),
        Route("/events", events),
        Route(CHAT, ask, methods=["POST"]),
    ]
    return GuardedApp(Starlette(routes=routes, lifespan=lifespan), guard, changes.end)


class ViewPool:
    """Runs views in a few threads, each with a deadline, so that one that is slow or stuck holds up nobody for ever."""

    def __init__(self, answer: Answer, *, deadline_s: float) -> None:
        self._view = answer
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="view")
        self._num_open = 0

    async def answer(self, name: str, arguments: Mapping[str, str]) -> Response:
        """The view's JSON, or a sentence with a status that says why not."""
        if self._num_open >= WORKERS + MOST_WAITING:
            return _problem(503, "The page has too many open questions. Wait a moment and reload it.")
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, self._answer, name, arguments)
        self._num_open += 1
        future.add_done_callback(self._close_one)
        try:
            # The thread goes on, and counts as open until its view ends.
            return await asyncio.wait_for(asyncio.shield(future), self._deadline_s)
        except TimeoutError:
            return _problem(504, f"{name} took longer than {self._deadline_s:g} s. Ask for less, such as fewer steps.")

    def close(self) -> None:
        """Waits for no view: they only read."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _close_one(self, _: object) -> None:
        self._num_open -= 1

    def _answer(self, name: str, arguments: Mapping[str, str]) -> Response:
        try:
            value = self._view(name, arguments)
        except Mistake as error:
            return _problem(400, str(error))
        except Exception as error:  # a view that breaks takes down neither the page nor other views
            logger.exception("view %s failed", name)
            return _problem(500, f"{name} failed with {type(error).__name__}: {error}")
        content = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        # A lone surrogate, which json.loads accepts from a file, is no UTF-8.
        return Response(content.encode(errors="replace"), media_type="application/json")


class Changes:
    """Looks at the files while somebody listens, and tells all listeners when they have changed."""

    def __init__(self, signature: Signature, *, every_s: float) -> None:
        self._signature = signature
        self._every_s = every_s
        # A thread of its own: views that are stuck must not hide that files change.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="changes")
        self._listeners: set[asyncio.Queue[int | None]] = set()
        self._number = 0
        self._has_ended = False

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        signature = None
        while True:
            await asyncio.sleep(self._every_s)
            if not self._listeners:
                continue
            try:
                latest = await asyncio.get_running_loop().run_in_executor(self._pool, self._signature)
            except (OSError, Mistake):  # a file that is moved at this moment
                continue
            if signature is not None and latest != signature:
                self._tell()
            signature = latest

    def _tell(self) -> None:
        self._number += 1
        for queue in self._listeners:
            if queue.empty():  # a listener that is slow hears of many changes once
                queue.put_nowait(self._number)

    async def stream(self) -> AsyncIterator[dict[str, str]]:
        """The events of one listener."""
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield {"event": "hello", "data": "0"}
            while not self._has_ended and (number := await queue.get()) is not None:
                yield {"event": "change", "data": str(number)}
        finally:
            self._listeners.discard(queue)

    def end(self) -> None:
        """End all streams: a server waits for its answers before it ends."""
        self._has_ended = True
        for queue in self._listeners:
            queue.put_nowait(None)

    def close(self) -> None:
        """Waits for no look."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def signature_of(runs: Runs) -> object:
    """Times and sizes of what the runs' views read. New runs count too."""
    folders = ("steps", "open", "evaluations")
    files = ("metrics.jsonl", "prompts.jsonl", "options.json", f"{RECORD}/starts.jsonl", f"{RECORD}/events.jsonl")
    stamps = []
    for run in runs.refresh():
        logs = sorted((run.directory / RECORD / "open").glob("*.log"))
        paths = [run.directory / name for name in files] + [run.directory / RECORD / name for name in folders] + logs
        stamps.append([(str(path), stamp_of(path)) for path in paths])
    return stamps


async def page_file(request: Request) -> Response:
    """A file of the page. Only names that the folder has: no path leads out of it."""
    name = request.path_params.get("name", "index.html")
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in KINDS}
    if name not in files:
        return _problem(404, "The page has no such file.")
    return Response(files[name].read_bytes(), headers={"Content-Type": KINDS[files[name].suffix]})


def serve(runs: Runs, *, host: str = LOOPBACK, port: int = 0, token: str | None = None) -> int:
    """Shows the page until Ctrl-C. Prints its URL, with the token, once. Returns the exit code.

    With port 0 it takes 8420, or any free one if 8420 is taken.
    """
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    guard = Guard(token or secrets.token_urlsafe(24), f"watch_{port}", _names_of(host))
    shown_host = f"[{host}]" if ":" in host else host
    print(f"http://{shown_host}:{port}/?token={guard.token}\nCtrl-C ends it.", flush=True)
    chat = PageChat(runs) if host in ("localhost", LOOPBACK, "::1") else None
    app = create_app(partial(views.answer, runs), partial(signature_of, runs), guard, chat=chat)
    try:
        uvicorn_server(app).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


class PageServer(uvicorn.Server):
    """Ends the streams of events before it waits for answers."""

    def __init__(self, config: uvicorn.Config, app: GuardedApp) -> None:
        super().__init__(config)
        self._guarded_app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._guarded_app.end()
        await super().shutdown(sockets)


def uvicorn_server(app: GuardedApp) -> PageServer:
    """Serves the application on sockets. It logs no request, because a request may hold the token."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return PageServer(config, app)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = (port,) if port else (PORT, 0)
    if not 0 <= port <= 65535:
        raise Mistake(f"--port {port}: a port is a number from 1 to 65535.")
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            return listener
        except OSError as error:
            listener.close()
            if number == ports[-1]:
                raise Mistake(
                    f"cannot listen on {host} port {number}: {error.strerror}. Give another --port or --host."
                ) from error
    raise AssertionError("unreachable")


def _names_of(host: str) -> frozenset[str]:
    """Names in a Host header that mean this server. Addresses are accepted anyway: nobody can let an address point elsewhere."""
    names = {"localhost", host}
    if host != LOOPBACK:
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names)


def _without_port(host_header: str) -> str:
    host = host_header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _token_of(query: str) -> str:
    try:
        return parse_qs(query).get("token", [""])[0]
    except ValueError:  # thousands of fields
        return ""


def _problem(status: int, text: str) -> Response:
    return Response(json.dumps({"problem": text}), status, media_type="application/json")
