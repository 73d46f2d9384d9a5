"""A scripted OpenAI-style server, and what it takes to roll out trajectories against it in one process."""

import asyncio
import functools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from conftest import TINY_MODEL

from open_instruct.chat_codec import ChatCodec
from open_instruct.engines.openai_client import OpenAIClient, Server, ServerPool, make_session
from open_instruct.rc.scheduler import SchedulerOptions, schedule_rollouts
from open_instruct.workflows.rc.policies import generate_math_rollout
from open_instruct.workflows.rc.state import InferenceProblemState, RCSettings
from open_instruct.workflows.rc.turns import RCTurns
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, Problem, RetryOptions, RolloutResult

THINK_MARK, SUMMARY_MARK = "THINK ABOUT", "SUM UP"
MAX_MODEL_LEN = 4096
TIMEOUT_S = 60.0
DOCUMENTED = [
    (0, "reasoning", 1),
    (1, "summarization", 1),
    (2, "reasoning", 2),
    (3, "summarization", 2),
    (4, "reasoning", 3),
    (5, "summarization", 3),
]
"""Number, type and turn of each call of a rollout of three cycles, as the source document lists them."""


@functools.cache
def codec() -> ChatCodec:
    from transformers import AutoTokenizer

    return ChatCodec(AutoTokenizer.from_pretrained(TINY_MODEL))


@dataclass(frozen=True)
class Call:
    """One request for a completion, as the server saw it."""

    number: int
    """From 0, over all calls of this server."""
    turn_type: str
    prompt: str
    """Without special tokens."""
    body: dict[str, Any]
    authorization: str | None = None


def completion(said: str, finish_reason: str = "stop", **fields: Any) -> dict[str, Any]:
    """What a server says to a turn; `fields` replace or add to those of the choice."""
    token_ids = codec().encode(said)
    choice = {
        "text": said,
        "finish_reason": finish_reason,
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": [-0.5] * len(token_ids)},
    }
    return {"choices": [choice | fields]}


Script = Callable[[Call], dict[str, Any] | web.Response | None]
"""The reply: a body, a whole response, or None for a connection that breaks off."""


def polite(call: Call) -> dict[str, Any]:
    """Numbered replies; the reasoning ends in a right answer."""
    return completion(f"{call.turn_type} {call.number} <answer>yes</answer>")


@dataclass
class ScriptedServer:
    """An OpenAI-style server that answers as scripted, in a thread of its own. Use as a context manager."""

    script: Script = polite
    delay_s: float = 0.0
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny", "max_model_len": MAX_MODEL_LEN}])
    api_key: str = ""
    calls: list[Call] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0
    port: int = 0

    def __enter__(self) -> "ScriptedServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """On the same port as before, where it was started before."""
        self.port = self.port or free_port()
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(TIMEOUT_S)

    def stop(self) -> None:
        """At once: connections that are open break off."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(TIMEOUT_S)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        self._loop.run_until_complete(site.start())
        started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "no such key"}, status=401)
        return web.json_response({"data": self.models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = codec().decode(body["prompt"])
        turn_type = SUMMARIZATION if SUMMARY_MARK in prompt else REASONING
        call = Call(len(self.calls), turn_type, prompt, body, request.headers.get("Authorization"))
        self.calls.append(call)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            reply = self.script(call)
        finally:
            self.in_flight -= 1
        if reply is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return reply if isinstance(reply, web.Response) else web.json_response(reply)

    def of_type(self, turn_type: str) -> list[Call]:
        return [call for call in self.calls if call.turn_type == turn_type]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# --- trajectories -----------------------------------------------------------------------------------------------------


def settings(num_reasoning_steps: int = 3, **further: Any) -> RCSettings:
    values: dict[str, Any] = {
        "reasoning_prompt_template": THINK_MARK + " {problem} KNOWING {curr_summary} GO",
        "summarization_prompt_template": SUMMARY_MARK + " {problem} OLD {existing_summary} NEW {reasoning} GO",
        "max_reasoning_tokens": 256,
        "max_summary_tokens": 128,
    }
    return RCSettings(num_reasoning_steps=num_reasoning_steps, **values | further)


def problem(text: str = "PROBLEM", number: int = 0) -> Problem:
    return Problem(f"test#{number}", text, "yes", "string_matcher", "test")


def states(num: int = 1, rc: RCSettings | None = None) -> list[InferenceProblemState]:
    rc = rc or settings()
    return [InferenceProblemState(problem(f"PROBLEM{number}.", number), rc) for number in range(num)]


async def score(_: Problem, token_ids: list[int], text: str) -> float:
    return float("<answer>yes</answer>" in text)


async def no_sleep(_: float) -> None:
    return


@dataclass
class Rig:
    """Client, workflow and scheduler around some servers."""

    servers: Sequence[ScriptedServer]
    summarizers: Sequence[ScriptedServer] = ()
    num_slots: int = 4
    retry: RetryOptions = field(default_factory=RetryOptions)
    max_in_flight: int = 8
    max_requeues: int = 10
    policies: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys((REASONING, SUMMARIZATION), generate_math_rollout)
    )
    score: Any = score
    sleep: Any = no_sleep
    max_model_len: int = MAX_MODEL_LEN
    pools: dict[str, ServerPool] = field(default_factory=dict)

    def run(self, todo: Sequence[InferenceProblemState]) -> list[RolloutResult]:
        """Results in the order in which they came."""
        return asyncio.run(asyncio.wait_for(self._run(todo), TIMEOUT_S))

    async def _run(self, todo: Sequence[InferenceProblemState]) -> list[RolloutResult]:
        problems: Any = queue.Queue()
        results: Any = queue.Queue()
        for state in [*todo, None]:
            problems.put(state)
        async with make_session() as session:
            client = OpenAIClient(session, self.pools, "tiny", codec().encode, self.retry, sleep=self.sleep)
            self._make_pools(client)
            workflow = RCTurns(client.generate, codec(), self.policies, self.score, self.max_model_len)
            options = SchedulerOptions(self.max_in_flight, self.max_requeues)
            try:
                await schedule_rollouts(problems, results, workflow, options)
            finally:
                for pool in set(self.pools.values()):
                    await pool.close()
        return [results.get() for _ in range(results.qsize())]

    def _make_pools(self, client: OpenAIClient) -> None:
        def pool(servers: Sequence[ScriptedServer]) -> ServerPool:
            return ServerPool(
                [Server(one.url, self.num_slots) for one in servers],
                client.is_there,
                max_downtime_s=self.retry.max_server_downtime_s,
                probe_interval_s=0.05,
            )

        self.pools[REASONING] = pool(self.servers)
        self.pools[SUMMARIZATION] = pool(self.summarizers) if self.summarizers else self.pools[REASONING]


def table(result: RolloutResult) -> list[tuple[int, str, int]]:
    """The document's table of a trajectory."""
    return [
        (turn.metadata["cycle_step"], turn.metadata["turn_type"], turn.metadata["turn_number"])
        for turn in result.rollouts
    ]
