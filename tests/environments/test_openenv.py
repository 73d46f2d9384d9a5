"""Sessions on OpenEnv servers that ask whether their client is still there, as uvicorn does. Server and process are real."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from environment_stage import EnvironmentStage

from open_instruct.environments.base import EnvironmentSpec, Turn
from open_instruct.environments.openenv import OpenEnv, text_of
from open_instruct.environments.processes import EnvironmentFailed

DEADLINE_S = 60.0
EVERY_S, PATIENCE_S = 0.1, 2.0
"""How often the server asks, and how long it waits for the answer before it hangs up. With uvicorn both are 20 s."""
SAYS = {"observation": {"message": "hello"}, "reward": 0.5, "done": False}


class AskingServer:
    """Answers everything with the same observation. Asks for a sign of life, and hangs up without an answer."""

    def __init__(self) -> None:
        self.num_signs = 0
        self.is_over = asyncio.Event()
        self.was_seen = asyncio.Event()
        """Three signs have come since the last message."""
        self.channel: Any = None

    async def serve(self, request: Any) -> Any:
        from aiohttp import WSMsgType, web

        self.channel = web.WebSocketResponse(autoping=False)
        await self.channel.prepare(request)
        asking = asyncio.create_task(self._ask())
        async for message in self.channel:
            if message.type is WSMsgType.PONG:
                self.num_signs += 1
                self._answered.set()
                if self.num_signs == 3:
                    self.was_seen.set()
            elif message.type is WSMsgType.TEXT:
                if message.json()["type"] == "close":
                    break
                self.num_signs = 0
                self.was_seen.clear()
                await self.channel.send_json({"type": "observation", "data": SAYS})
        asking.cancel()
        self.is_over.set()
        return self.channel

    async def _ask(self) -> None:
        while True:
            self._answered = asyncio.Event()
            await self.channel.ping()
            try:
                await asyncio.wait_for(self._answered.wait(), PATIENCE_S)
            except TimeoutError:
                self.is_over.set()
                await self.channel.close(code=1011, message=b"keepalive ping timeout")
                return
            await asyncio.sleep(EVERY_S)

    async def seen_or_over(self) -> None:
        """Until the client has given signs of life, or is given up."""
        waits = [asyncio.create_task(event.wait()) for event in (self.was_seen, self.is_over)]
        await asyncio.wait(waits, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


@pytest.fixture
def stage() -> Iterator[EnvironmentStage]:
    stage = EnvironmentStage()
    yield stage
    stage.close()


@contextlib.asynccontextmanager
async def session(stage: EnvironmentStage) -> Any:
    """A server, and the lease of an environment that is reset on it."""
    from aiohttp import web

    server, app = AskingServer(), web.Application()
    app.router.add_get("/ws", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    spec = EnvironmentSpec("openenv", "it", {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    lease = await stage.pool.lease(spec, DEADLINE_S)
    try:
        await lease.reset({}, 7, DEADLINE_S)
        yield server, lease
    finally:
        await stage.pool.give_back(lease)
        await runner.cleanup()


def test_a_session_outlives_turns_in_which_the_server_asks_for_signs_of_life(stage: EnvironmentStage) -> None:
    async def play() -> None:
        async with session(stage) as (server, lease):
            for _ in range(2):
                await server.seen_or_over()  # meanwhile the model speaks
                said = await lease.step(Turn("hi"), DEADLINE_S)
                assert (said.reward, said.messages[0]["content"]) == (0.5, "hello")
            await lease.close()
            await asyncio.wait_for(server.is_over.wait(), DEADLINE_S)

    stage.run(play())


def test_a_server_that_hangs_up_while_the_model_speaks_is_the_environments_failure(stage: EnvironmentStage) -> None:
    async def play() -> None:
        async with session(stage) as (server, lease):
            await server.seen_or_over()
            await server.channel.close(code=1011, message=b"it broke")
            with pytest.raises(
                EnvironmentFailed, match="it: step: RuntimeError: the server ended the session: it broke"
            ):
                await lease.step(Turn("hi"), 20.0)

    stage.run(play())


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"echoed_message": "hi", "message_length": 2}, "hi"),
        ({"prompt": "Wordle-v0", "messages": [{"sender_id": -1, "content": "G X Y"}]}, "G X Y"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "tokens": [1]}, "a\nb"),
        ({"prompt": "Go.", "messages": []}, "Go."),
        ({"instruction": "Sort it.", "output": "", "success": True}, '{"instruction": "Sort it.", "success": true}'),
        ({"message": "", "done": False}, ""),
        ({"stdout": "", "exit_code": 0}, '{"stdout": "", "exit_code": 0}'),
    ],
)
def test_the_text_of_an_observation(observation: dict[str, Any], text: str) -> None:
    assert text_of(observation) == text


def test_a_game_of_textarena_says_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server sends the whole history with each turn, and as `prompt` the game's name from the second turn on."""
    history = [
        "\n[GAME] Guess a word.",
        "\n[Player 0] [slate]\n[GAME] X X G X G",
        "\n[Player 0] [crane]\n[GAME] You won.",
    ]

    async def connect() -> None:
        asked.clear()

    async def ask(kind: str, data: object) -> tuple[Any, float, bool]:
        asked.append(kind)
        said = {"sender_id": -1, "content": "".join(history[: len(asked)]), "category": "MESSAGE"}
        return {"prompt": "Wordle-v0", "messages": [said]}, 0.0, len(asked) == 3

    asked: list[str] = []
    game = OpenEnv("http://127.0.0.1:1")
    monkeypatch.setattr(game, "_connect", connect)
    monkeypatch.setattr(game, "_ask", ask)

    async def play() -> list[str]:
        opening = await game.reset({}, 7)
        turns = [await game.step(Turn(word)) for word in ("[slate]", "[crane]")]
        return [str(message["content"]) for said in (opening, *turns) for message in said.messages]

    for _ in range(2):  # a second episode begins anew
        assert asyncio.run(play()) == [history[0], *(part.strip("\n") for part in history[1:])]
