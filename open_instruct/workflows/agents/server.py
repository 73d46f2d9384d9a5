"""The engine's side of agent programs: one HTTP server on loopback, and a session for each program.

    program ── HTTP ──► session: a queue of requests ── {"do": "next"} ──► the rollout's coroutine
            ◄─────────── the reply, as a future      ◄─ {"do": "reply"} ──          │ ctx.generate

The server only decides to which program a request belongs. What the request means, and how it is answered, is decided by the
rollout, which sees only plain values. All of this runs in the event loop of the engine's rollouts.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from open_instruct.system.cells.places import Places
from open_instruct.workflows.agents.options import AgentOptions, search_path
from open_instruct.workflows.agents.programs import Program
from open_instruct.workflows.agents.protocol import error_body

HOST = "127.0.0.1"
MOST_BODY_BYTES = 2**26
CLOSE_S = 5.0
SESSION_HEADER = "X-Session-ID"
PATHS = {"generate": "/inference/v1/generate", "chat": "/v1/chat/completions", "models": "/v1/models"}
NO_PROXY = ("no_proxy", "NO_PROXY")


class Session:
    """One program, and its requests."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.program: Program | None = None
        self.has_place = False
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[tuple[int, Any]]] = {}
        self._delivered: dict[int, asyncio.Future[bool]] = {}
        self._num_requests = 0
        self._is_over = False
        self._began = time.monotonic()
        self._idle_s = 0.0
        self._waiting: asyncio.Task[None] | None = None

    def watch(self, program: Program) -> None:
        """Called when the program has started. The program's end becomes an event."""
        self.program = program
        self._began = time.monotonic()
        self._waiting = asyncio.create_task(self._wait(program))

    async def _wait(self, program: Program) -> None:
        try:
            end = await program.wait()
        except Exception as error:
            self._events.put_nowait({"kind": "lost", "why": f"{type(error).__name__}: {error}"})
            return
        if not self._replies:
            self._idle_s += time.monotonic() - self._began
        event = {"kind": "ended", "code": end.code, "is_late": end.is_late, "idle_s": self._idle_s}
        self._events.put_nowait({**event, "last_line": end.last_line, "errors": end.errors})

    async def next(self) -> dict[str, Any]:
        return await self._events.get()

    async def ask(self, kind: str, body: Any, connection: web.Request) -> tuple[int, Any]:
        """The reply to a request of the program: a status and a body."""
        if self._is_over:
            return 503, error_body("the rollout is over", "rollout_over")
        number = self._num_requests
        self._num_requests += 1
        if not self._replies:
            self._idle_s += time.monotonic() - self._began
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._delivered[number] = asyncio.get_running_loop().create_future()
        self._events.put_nowait({"kind": "request", "number": number, "path": kind, "body": body})
        try:
            status, content = await reply
            self._settle(number, connection.transport is not None and not connection.transport.is_closing())
            return status, content
        finally:
            self._settle(number, False)
            self._replies.pop(number, None)
            if not self._replies:
                self._began = time.monotonic()

    def _settle(self, number: int, is_delivered: bool) -> None:
        future = self._delivered.get(number)
        if future is not None and not future.done():
            future.set_result(is_delivered)

    async def reply(self, number: int, status: int, content: Any) -> bool:
        """Answer a request. Returns whether the program received the reply."""
        reply = self._replies.get(number)
        if reply is not None and not reply.done():
            reply.set_result((status, content))
        return await self._delivered[number]

    async def end(self) -> None:
        """Kill the program, refuse its open requests, and wait until it has ended."""
        self._is_over = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result((503, error_body("the rollout is over", "rollout_over")))
        self.kill()
        if self.program is not None and self._waiting is not None:
            await self.program.gone()
            await asyncio.wait([self._waiting], timeout=CLOSE_S)

    def kill(self) -> None:
        if self.program is not None:
            self.program.kill()


class AgentHost:
    """The HTTP server and the programs of an engine, behind the tool `agent` of a rollout's context."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._sessions: dict[str, Session] = {}
        """Sessions by the rollout's key."""
        self._of_secrets: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        self._starting = asyncio.Lock()
        self._places = Places(options.agent_max_concurrent or 2**30)

    async def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request of a rollout. Plain values in and out."""
        if request["do"] == "start":
            return await self._start(request)
        if request["do"] == "end":
            return await self._end(request["key"])
        session = self._sessions[request["key"]]
        if request["do"] == "next":
            return await session.next()
        assert request["do"] == "reply", request["do"]
        if (seconds := request.get("hurry_s")) is not None and session.program is not None:
            session.program.hurry(seconds)
        is_delivered = await session.reply(request["number"], request["status"], request["body"])
        return {"is_delivered": is_delivered}

    async def _start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        options, began = self._options, time.monotonic()
        session = self._sessions[request["key"]] = Session()
        await self._places.take()
        session.has_place = True
        wait_s = time.monotonic() - began
        async with self._starting:
            if self._runner is None:
                await self._listen()
        self._of_secrets[session.secret] = session
        program = await Program.start(
            options.words,
            variables=self._variables(session.secret, request["model"]),
            directory=options.agent_directory,
            text=json.dumps(request["row"]) + "\n",
            timeout_s=options.agent_timeout_s,
        )
        session.watch(program)
        return {"wait_s": wait_s}

    async def _end(self, key: str) -> dict[str, Any]:
        session = self._sessions.pop(key, None)
        if session is None:
            return {}
        try:
            await session.end()
        finally:
            self._of_secrets.pop(session.secret, None)
            if session.has_place:
                self._places.give_back()
        return {}

    def _variables(self, secret: str, model: str) -> dict[str, str]:
        """The program's environment variables: those of the engine, and the address and name of the model."""
        base = f"http://{HOST}:{self._port}/s/{secret}"
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), HOST]))
        return {
            **os.environ,
            **dict.fromkeys(NO_PROXY, no_proxy),
            "PATH": search_path(),
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": secret,
            "OPEN_INSTRUCT_GENERATE_URL": base + PATHS["generate"],
            "OPEN_INSTRUCT_MODEL": model,
        }

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self._runner, self._loop = runner, asyncio.get_running_loop()
        self._port = runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.Response:
        status, content = await self._answer(request)
        return web.json_response(content, status=status)

    async def _answer(self, request: web.Request) -> tuple[int, Any]:
        secret, path = _session_of(request)
        session = self._of_secrets.get(secret)
        if session is None:
            problem = (
                "there is no session of this name"
                if secret
                else f"no session is named: use the URL, or {SESSION_HEADER}"
            )
            return 401, error_body(problem, "no_session")
        kind = next((kind for kind, endpoint in PATHS.items() if endpoint == path), None)
        if kind is None:
            return 404, error_body(f"there is no {path}; there are {', '.join(PATHS.values())}", "not_found")
        if request.method != ("GET" if kind == "models" else "POST"):
            return 405, error_body(f"{path} does not take {request.method}", "method_not_allowed")
        body: Any = None
        if kind != "models":
            try:
                body = json.loads(await request.read())
            except (ValueError, RecursionError) as error:
                return 400, error_body(f"the body is no JSON: {error}", "invalid_json")
        return await session.ask(kind, body, request)

    def close(self) -> None:
        """End all programs and the server. Called when the event loop has stopped."""
        for session in self._sessions.values():
            session.kill()
        self._sessions.clear()
        runner, loop, self._runner = self._runner, self._loop, None
        if runner is not None and loop is not None and not loop.is_running() and not loop.is_closed():
            with suppress(Exception):  # the process is about to end, and the kernel closes what remains open
                loop.run_until_complete(asyncio.wait_for(runner.cleanup(), 2 * CLOSE_S))


def _session_of(request: web.Request) -> tuple[str, str]:
    """The secret that a request contains, and the path without the secret. The URL takes precedence over the header, because an
    agent may use the header for sessions of its own."""
    path = request.path
    if path.startswith("/s/"):
        secret, _, rest = path.removeprefix("/s/").partition("/")
        return secret, f"/{rest}"
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return request.headers.get(SESSION_HEADER) or bearer, path
