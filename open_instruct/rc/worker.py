"""A process that works on trajectories. It runs the scheduler with all its parts between two queues of the actor loop.

    RCActorLoop ── problem_queue ──► work(): tokenizer, HTTP client, verifiers, schedule_rollouts ── result_queue ──► RCActorLoop

A worker that cannot go on says why in its last message, a `WorkerEnded`. A worker that is killed sends nothing; the loop notices
that its process has ended.
"""

import asyncio
import contextlib
import importlib
import logging
import logging.handlers
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.engines.openai_client import OpenAIClient, Server, ServerPool, make_session
from open_instruct.engines.server_keys import key_headers
from open_instruct.rc.scheduler import BoundedQueue, SchedulerOptions, schedule_rollouts
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.workflows.rc.turns import RCTurns, RolloutPolicy, Score
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, EnginesDown, NotScored, Problem, RetryOptions

VERIFIER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker. The servers' key is not among them: it is in the environment."""

    number: int
    tokenizer: str
    model: str
    """Name by which the servers know the model."""
    max_model_len: int
    urls: dict[str, list[str]]
    """Addresses of servers by turn type."""
    api_key_urls: list[str]
    """Servers that get the key in OPENAI_API_KEY."""
    num_slots: int
    """This worker's share of the slots of each server."""
    policies: dict[str, str]
    """Dotted paths of the rollout policies by turn type."""
    verifiers: list[str]
    """Verifiers that are loaded at the start."""
    retry: RetryOptions
    max_requeues: int


@dataclass(frozen=True)
class WorkerStarted:
    """The first message of a worker: everything is loaded, and turns begin."""

    number: int


@dataclass(frozen=True)
class WorkerEnded:
    """The last message of a worker."""

    number: int
    error: str = ""
    """Why the worker could not go on; empty if it has finished its work."""


def work(options: WorkerOptions, problem_queue: Any, result_queue: Any, log_queue: Any, stopping: Any) -> None:
    """The body of the process. Consumes states until it gets None; produces results and, at the end, a `WorkerEnded`."""
    give_way()
    for number in (signal.SIGINT, signal.SIGHUP):  # only the loop decides when workers end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    root = logging.getLogger()
    root.handlers = [logging.handlers.QueueHandler(log_queue)]
    root.setLevel(logging.INFO)
    loop_process = multiprocessing.parent_process()

    def is_stopping() -> bool:
        return stopping.is_set() or (loop_process is not None and not loop_process.is_alive())

    try:
        asyncio.run(_work(options, problem_queue, result_queue, is_stopping))
        error = ""
    except (Exception, SystemExit) as failure:  # the loop must learn of every error, even of a policy's sys.exit(0)
        logging.getLogger(__name__).debug("traceback", exc_info=failure)
        is_told = isinstance(failure, ValueError | EnginesDown)
        error = str(failure) if is_told else f"{type(failure).__name__}: {failure}"
    if is_stopping():
        result_queue.cancel_join_thread()
    else:
        result_queue.put(WorkerEnded(options.number, error))


def give_way() -> None:
    """If the kernel can do so, keep this process and its child processes from preempting a running process when they wake up.

    On a machine with few cores the running process is the server, and a step of the server that begins late delays all turns.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


async def _work(
    options: WorkerOptions, problem_queue: BoundedQueue, result_queue: BoundedQueue, is_stopping: Callable[[], bool]
) -> None:
    with VerifierPool(1, VERIFIER_TIMEOUT_S, ready=options.verifiers) as verifiers:  # loads in the background
        codec = ChatCodec(load_tokenizer(options.tokenizer))
        policies: dict[str, RolloutPolicy] = {name: load_dotted(path) for name, path in options.policies.items()}
        async with make_session() as session:
            client = OpenAIClient(session, {}, options.model, codec.encode, options.retry)
            pools = make_pools(options, client)
            client.pools = pools
            workflow = RCTurns(client.generate, codec, policies, score_with(verifiers), options.max_model_len)
            num_slots = sum(server.num_slots for pool in set(pools.values()) for server in pool.servers)
            scheduler = SchedulerOptions(max_in_flight(num_slots), options.max_requeues)
            await wait_until_ready(verifiers)
            result_queue.put(WorkerStarted(options.number))
            try:
                await schedule_rollouts(problem_queue, result_queue, workflow, scheduler, is_stopping=is_stopping)
            finally:
                for pool in set(pools.values()):
                    await pool.close()


def max_in_flight(num_slots: int) -> int:
    """Trajectories at once: a quarter more than slots, and at least one more, so that a free slot is taken again at once.

    With 16 slots: 20.
    """
    return num_slots + max(1, num_slots // 4)


def make_pools(options: WorkerOptions, client: OpenAIClient) -> dict[str, ServerPool]:
    """A pool of servers for each turn type. Turn types with the same addresses share one pool."""

    def pool(urls: list[str]) -> ServerPool:
        servers = [Server(url, options.num_slots, key_headers(url, options.api_key_urls)) for url in urls]
        return ServerPool(servers, client.is_there, max_downtime_s=options.retry.max_server_downtime_s)

    reasoning = pool(options.urls[REASONING])
    if options.urls[SUMMARIZATION] == options.urls[REASONING]:
        return {REASONING: reasoning, SUMMARIZATION: reasoning}
    return {REASONING: reasoning, SUMMARIZATION: pool(options.urls[SUMMARIZATION])}


async def wait_until_ready(verifiers: VerifierPool) -> None:
    """Wait until the verifiers are loaded, so that loading does not count as time of the rollouts.

    The group that is submitted has no verifier; its future completes when the pool is ready.
    """
    await asyncio.wrap_future(verifiers.submit("", None, [[]], [""]))


def score_with(verifiers: VerifierPool) -> Score:
    """A function that scores a response in processes that can be killed."""

    async def score(problem: Problem, token_ids: list[int], text: str) -> float:
        future = verifiers.submit(problem.verifier, problem.ground_truth, [token_ids], [text])
        scored = (await asyncio.wrap_future(future))[0]
        if scored.score is None:
            raise NotScored(f"{problem.verifier}: {scored.failure}")
        return scored.score

    return score


def load_tokenizer(name: str) -> Any:
    """The tokenizer, which has a chat template.

    Raises:
        ValueError: there is no tokenizer, or it has no chat template.
    """
    try:
        tokenizer = read_tokenizer(name, None)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model_path {name}: it has no tokenizer here ({reason}). Check the path or name.") from error
    if not tokenizer.chat_template:
        raise ValueError(f"model_path {name}: its tokenizer has no chat template. Name a chat model.")
    return tokenizer


def load_dotted(path: str) -> Any:
    """The object that a dotted path names.

    Raises:
        ValueError: the object cannot be loaded.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise ValueError(
            f"{path}: it cannot be loaded ({type(error).__name__}: {error}). Check the dotted path."
        ) from error
