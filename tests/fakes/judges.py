"""A judge on this machine: a real server of OpenAI's protocol, whose answers a test chooses."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], int], Any]


class JudgeServer:
    """`answer(body, number)` is a text, a status, or a coroutine that gives one of them."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body, number: '{"SCORE": 1}'
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.most_at_once = self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _start(self) -> int:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = self.answer(body, len(self.bodies))
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self._at_once -= 1
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        usage = {"prompt_tokens": 1000, "completion_tokens": 200}
        return web.json_response({"choices": [{"message": {"content": answer}}], "usage": usage})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # of connections that clients have not closed
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
