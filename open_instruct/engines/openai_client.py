"""Turns answered by OpenAI-compatible servers: slots, least-loaded first, retries with back-off, servers that go down and return.

    generate() ─► ServerPool.acquire ─► POST /completions ─► release
                    waits for a slot of a     │ refused: the request is given up           TurnRejected
                    server that is up         │ passing failure: back off, try again       RetriesExhausted after max_retries
                                              │ server gone: wait until one is back,       EnginesDown after max_server_downtime_s
                                              └ which costs the turn none of its retries

Prompts are sent as token ids. Some servers return token ids too (vLLM: `return_token_ids`). With other servers the returned text
is tokenized here and the turn is marked as inexact.
"""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from open_instruct.engines.server_keys import KEY_VARIABLE, VLLM_KEY_VARIABLE
from open_instruct.system.tcp import make_socket
from open_instruct.workflows.rc.types import (
    EnginesDown,
    Generation,
    RetriesExhausted,
    RetryOptions,
    TurnRejected,
    TurnRequest,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""Limit for opening a connection to a server. An open connection whose machine is lost breaks after `tcp.LOST_S`."""
PROBE_TIMEOUT_S = 2.0
PROBE_INTERVAL_S = 1.0
MAX_INTERRUPTIONS = 10
"""How often a server may go down during one turn without costing the turn a try. Further times count as failures, because the
turn itself may be what brings servers down."""
IDLE_CONNECTION_S = 3.0
"""Shorter than the time that servers keep an idle connection (vLLM: 5 s). Otherwise a server may close a connection just as it is
used again."""
PASSING_STATUS = frozenset((408, 429))
"""HTTP statuses below 500 after which another try may succeed."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says about its model."""

    name: str
    max_model_len: int | None


# --- servers ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Server:
    """One server and the turns that it is answering."""

    url: str
    num_slots: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """The header with the server's key, if the server has one."""
    in_flight: int = 0
    down_since: float | None = None
    """Monotonic time at which the server went down; None while it is up."""


class ServerPool:
    """Hands out slots of servers that are up. The turn that has waited longest gets the next slot, on the least loaded server.

    A pool belongs to one event loop.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        is_there: Callable[[Server], Awaitable[bool]],
        *,
        max_downtime_s: float,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self.servers = list(servers)
        self._is_there = is_there
        self._max_downtime_s = max_downtime_s
        self._probe_interval_s = probe_interval_s
        self._waiting: deque[_Waiter] = deque()
        self._watchers: set[asyncio.Task[None]] = set()

    async def acquire(self, *, avoid: Server | None = None) -> Server:
        """Wait for a slot; on `avoid` only if no other server has one. Unblocked by `release` and by a server that comes back.

        Raises:
            EnginesDown: all servers have been gone for too long.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), avoid)
        self._waiting.append(waiter)
        self._hand_out()
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled():
                self.release(waiter.slot.result())
            raise

    def release(self, server: Server) -> None:
        server.in_flight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.slot.done():
                server = self._least_loaded(waiter.avoid)
                if server is None:
                    return
                server.in_flight += 1
                waiter.slot.set_result(server)
            self._waiting.popleft()

    def _least_loaded(self, avoid: Server | None) -> Server | None:
        servers = [server for server in self.servers if server.down_since is None]
        free = [server for server in servers if server.in_flight < server.num_slots]
        return min(free, key=lambda server: (server is avoid, server.in_flight), default=None)

    def mark_down(self, server: Server) -> None:
        """Give the server no more turns until it answers again."""
        if server.down_since is not None:
            return
        server.down_since = time.monotonic()
        logger.warning("%s does not answer: its turns wait or go elsewhere", server.url)
        watcher = asyncio.create_task(self._watch(server, server.down_since))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, server: Server, down_since: float) -> None:
        """Probe the server until it is back. Once all servers have been gone for too long, all waiting turns get the error."""
        while not await self._is_there(server):
            if (error := self._gone_too_long()) is not None:
                for waiter in self._waiting:
                    if not waiter.slot.done():
                        waiter.slot.set_exception(error)
            await asyncio.sleep(self._probe_interval_s)
        logger.warning("%s is back after %.0f s", server.url, time.monotonic() - down_since)
        server.down_since = None
        self._hand_out()

    def _gone_too_long(self) -> EnginesDown | None:
        outages = [server.down_since for server in self.servers if server.down_since is not None]
        gone_s = time.monotonic() - max(outages)
        if len(outages) < len(self.servers) or gone_s <= self._max_downtime_s:
            return None
        urls = ", ".join(server.url for server in self.servers)
        return EnginesDown(
            f"no server has answered for {gone_s:.0f} s (me.max_server_downtime_s {self._max_downtime_s:g}): {urls}. "
            "Start a server again, then run the same command: the run goes on with what is not in the stream yet."
        )

    async def close(self) -> None:
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


@dataclass(frozen=True)
class _Waiter:
    slot: "asyncio.Future[Server]"
    avoid: Server | None


# --- turns ------------------------------------------------------------------------------------------------------------


class _PassingFailure(Exception):
    """A failure after which another try may succeed. `may_be_gone`: whether to check that the server is still there."""

    def __init__(self, message: str, *, may_be_gone: bool = False) -> None:
        super().__init__(message)
        self.may_be_gone = may_be_gone


class MalformedReply(ValueError):
    """A reply that is not a completion."""


@dataclass
class OpenAIClient:
    """Generates turns over HTTP. Make a client inside the event loop that uses it."""

    session: aiohttp.ClientSession
    pools: Mapping[str, ServerPool]
    """The servers, by turn type."""
    model: str
    """The servers' name for the model."""
    encode: Callable[[str], list[int]]
    """Text to token ids, for servers that return none."""
    retry: RetryOptions
    version: int = 0
    """Version of the weights that the servers serve."""
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep)

    async def generate(self, request: TurnRequest) -> Generation:
        """Generate one turn, with as many tries as `retry` allows."""
        pool = self.pools[request.turn_type]
        num_failures = num_interruptions = 0
        failed_on: Server | None = None
        while True:
            failed_on, outcome = await self._try_once(pool, request, failed_on)
            await asyncio.sleep(0)  # the turn that waited for this slot is sent before this reply is read
            if isinstance(outcome, dict):
                return read_completion(outcome, self.encode, version=self.version, num_retries=num_failures)
            if failed_on.down_since is not None and num_interruptions < MAX_INTERRUPTIONS:
                num_interruptions += 1
                continue
            num_failures += 1
            if num_failures >= self.retry.max_retries:
                raise RetriesExhausted(f"{failed_on.url}: {outcome}", num_failures)
            await self.sleep(self.retry.retry_base_delay * 2 ** (num_failures - 1))

    async def _try_once(
        self, pool: ServerPool, request: TurnRequest, avoid: Server | None
    ) -> tuple[Server, dict[str, Any] | _PassingFailure]:
        """The server that was asked, and its reply or why there is none. A server that is gone is marked as down."""
        server = await pool.acquire(avoid=avoid)
        try:
            return server, await self._post(server, request)
        except _PassingFailure as failure:
            if failure.may_be_gone and not await self.is_there(server):
                pool.mark_down(server)
            return server, failure
        finally:
            pool.release(server)

    async def _post(self, server: Server, request: TurnRequest) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self.retry.request_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self.session.post(
                f"{server.url}/completions", json=self._body(request), headers=server.headers, timeout=timeout
            ) as response:
                content = await response.read()
                if response.status in PASSING_STATUS or response.status >= 500:
                    raise _PassingFailure(_excerpt(response.status, content), may_be_gone=response.status >= 500)
                if response.status != 200:
                    raise TurnRejected(f"{server.url}: {_excerpt(response.status, content)}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _PassingFailure(f"{type(error).__name__}: {error}", may_be_gone=True) from error
        return _checked(content)

    def _body(self, request: TurnRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def is_there(self, server: Server) -> bool:
        """Whether the server answers at all."""
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            async with self.session.get(f"{server.url}/models", headers=server.headers, timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


def _excerpt(status: int, content: bytes) -> str:
    text = " ".join(content[:300].decode(errors="replace").split())
    return f"HTTP {status} {text}"


def _checked(content: bytes) -> dict[str, Any]:
    """`parse_choice`, with a malformed reply as a failure that may pass.

    Raises:
        _PassingFailure: the reply is malformed.
    """
    try:
        return parse_choice(content)
    except MalformedReply as error:
        raise _PassingFailure(str(error)) from error


def parse_choice(content: bytes) -> dict[str, Any]:
    """The first choice of a completion: `text`, `finish_reason` and, each possibly None, `token_ids` and `logprobs`.

    Raises:
        MalformedReply: the reply is anything else, such as a completion that was aborted.
    """
    try:
        choice = json.loads(content)["choices"][0]
        text, finish_reason = choice["text"], choice["finish_reason"]
        token_ids, details = choice.get("token_ids"), choice.get("logprobs")
        logprobs = details["token_logprobs"] if details else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedReply(f"no completion in the reply ({type(error).__name__}): {content[:100]!r}") from error
    if not isinstance(text, str) or finish_reason not in ("stop", "length"):
        raise MalformedReply(f"the completion ended as {finish_reason!r} with {type(text).__name__}")
    if token_ids is not None and not _all(token_ids, int):
        raise MalformedReply("token_ids are no list of whole numbers")
    if logprobs is not None and not (_all(logprobs, int | float) and all(map(math.isfinite, logprobs))):
        raise MalformedReply("log-probs are no list of numbers")
    # JSON can hold half a surrogate pair, which is not valid text.
    text = text.encode(errors="replace").decode()
    return {"text": text, "finish_reason": finish_reason, "token_ids": token_ids, "logprobs": logprobs}


def _all(values: object, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def read_completion(
    choice: Mapping[str, Any], encode: Callable[[str], list[int]], *, version: int, num_retries: int
) -> Generation:
    """The result of `parse_choice` as a `Generation`. Log-probs are left out unless there is one for each sampled token."""
    token_ids = choice["token_ids"]
    is_exact = token_ids is not None
    if token_ids is None:
        token_ids = encode(choice["text"])
    logprobs = choice["logprobs"] or []
    return Generation(
        text=choice["text"],
        token_ids=token_ids,
        logprobs=logprobs if is_exact and len(logprobs) == len(token_ids) else [],
        finish_reason=choice["finish_reason"],
        version_spans=[(version, len(token_ids))],
        num_retries=num_retries,
        exact_tokens=is_exact,
    )


# --- before a run -----------------------------------------------------------------------------------------------------


class ServerProblem(RuntimeError):
    """A run cannot begin with this server; the message says why and what to do."""


async def find_model(url: str, name: str, *, headers: Mapping[str, str], timeout_s: float) -> ServedModel:
    """The model of the server at `url`: the model called `name`, or the only model. Waits for the server up to `timeout_s`.

    Raises:
        ServerProblem: the server cannot be reached, refuses the key, or serves other models.
    """
    deadline = time.monotonic() + timeout_s
    async with make_session(headers) as session:
        while True:
            content, problem = await _list_models(session, url, deadline - time.monotonic())
            if not problem:
                return _choose_model(url, name, content)
            if time.monotonic() + PROBE_INTERVAL_S / 2 > deadline:
                raise ServerProblem(
                    f"me.llm_urls {url}: no server answered within {timeout_s:g} s ({problem}). "
                    "Start it, check the address, or raise me.wait_for_server_s."
                )
            await asyncio.sleep(PROBE_INTERVAL_S / 2)


def make_session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session for turns. It does not limit connections, because the slots do, and each turn has a timeout of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=make_socket)
    return aiohttp.ClientSession(headers=headers, connector=connector)


async def _list_models(session: aiohttp.ClientSession, url: str, timeout_s: float) -> tuple[bytes, str]:
    """The answer of `/models`, and a problem that may pass by itself ("" if there is none)."""
    timeout = aiohttp.ClientTimeout(total=max(0.1, min(PROBE_TIMEOUT_S, timeout_s)))
    try:
        async with session.get(f"{url}/models", timeout=timeout) as response:
            content = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return b"", f"{type(error).__name__}: {error}".rstrip(": ")
    except ValueError as error:
        raise ServerProblem(f"me.llm_urls {url}: that is no address ({error}). Write http://host:port/v1.") from None
    if response.status in (401, 403):
        raise ServerProblem(
            f"me.llm_urls {url}: the server refuses the key (HTTP {response.status}). Set {VLLM_KEY_VARIABLE} to the key that "
            f"vLLM was started with; or {KEY_VARIABLE}, and name the server in me.api_key_urls: that key goes nowhere else."
        )
    return content, "" if response.status == 200 else _excerpt(response.status, content)


def _choose_model(url: str, name: str, content: bytes) -> ServedModel:
    try:
        cards = {str(card["id"]): card.get("max_model_len") for card in json.loads(content)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerProblem(
            f"me.llm_urls {url}: /models lists no models. Is it an OpenAI-compatible server?"
        ) from error
    if name not in cards and len(cards) != 1:
        raise ServerProblem(f"model_path {name}: {url} serves {', '.join(cards) or 'nothing'}. Name one of them.")
    chosen = name if name in cards else next(iter(cards))
    return ServedModel(chosen, cards[chosen] if isinstance(cards[chosen], int) else None)
