"""One rollout of an agent program: a coroutine that answers the program's requests, and keeps the tokens.

Everything goes through the context: `generate`, and calls of the tool `agent` (`server.py`), whose arguments and answers are
plain values. A program may have several requests open at once. Each request has a number, which is in the names of its effects.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from open_instruct.data_types import Completion, Sample, SamplingConfig
from open_instruct.workflows.agents.branches import Branch, Branches, Grown, Talk
from open_instruct.workflows.agents.chat import Chat
from open_instruct.workflows.agents.options import AgentOptions
from open_instruct.workflows.agents.protocol import (
    OutOfRoom,
    Refused,
    Wishes,
    chat_body,
    chat_request,
    error_body,
    finite,
    generate_body,
    generate_request,
    models_body,
)
from open_instruct.workflows.base import CallFailed, Context, RolloutFailed, first_of
from open_instruct.workflows.conversations.bridge import Bridge
from open_instruct.workflows.conversations.ledger import merged

AGENT = "agent"
"""Name of the context's tool through which a rollout controls its program."""
SLACK_S = 60.0
"""Time after a program's own deadline in which the engine's side notices the deadline and kills the program."""
START_ROUNDS = 100
"""A rollout waits for a place at most this many times as long as a program may run."""
AFTER_LIMIT_S = 60.0
"""Time that a program has to end once it has reached a token limit."""
LONGEST_CAUSE = 300


class ProgramFailed(RolloutFailed):
    """The program failed, through no fault of the model."""


@dataclass(frozen=True)
class Setting:
    """What all rollouts of one prompt have in common."""

    prompt_id: str
    row: Mapping[str, Any]
    """The row that the program reads from its standard input."""
    sampling: SamplingConfig
    """`max_tokens` bounds the response tokens of all samples of a rollout together."""
    options: AgentOptions
    bridge: Bridge
    model: str
    vocab_size: int


@dataclass
class Account:
    """The costs of a rollout, for metrics. Plain values."""

    num_requests: int = 0
    num_refused: int = 0
    num_lost: int = 0
    """Completions that the program did not receive, because it had hung up or ended."""
    num_samples: int = 0
    num_restarts: int = 0
    num_policy_tokens: int = 0
    num_inserted_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens that were sent to the engine, over all requests."""
    wait_s: float = 0.0
    """Seconds in which the rollout waited for a place."""
    program_s: float = 0.0
    """Seconds in which the program ran without an open request."""
    has_reward: bool = False
    at_limit: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the program printed together with its reward."""


@dataclass(frozen=True)
class Ended:
    """A rollout that is over."""

    samples: list[Sample]
    """Only the last sample is judged."""
    account: Account


@dataclass(frozen=True)
class Verdict:
    """What a program's last line says."""

    reward: float | None
    metrics: dict[str, float]


class AgentRollout:
    """One of the rollouts of a prompt.

    Args:
        number: number of this rollout among the rollouts of its prompt, from 0.
    """

    def __init__(self, setting: Setting, ctx: Context, number: int) -> None:
        self._setting = setting
        self._ctx = ctx
        self._number = number
        self._attempt = 0
        self._begin()

    def _begin(self) -> None:
        setting, ctx = self._setting, self._ctx
        self._account = Account(num_restarts=self._attempt)
        self._branches = Branches()
        parser_type = setting.options.agent_tool_parser_type
        self._chat = Chat(ctx.codec, setting.bridge, parser_type, ctx.vllm_parser)
        self._reserved = 0
        """Tokens that open requests may still add."""
        self._computing: dict[int, asyncio.Task[None]] = {}
        """Requests that have no reply yet, by number."""
        self._num_begun = 0
        """Samples that open requests are about to begin."""
        self._room = asyncio.Condition()
        self._created = int(ctx.now(name=f"{self._number}-begin"))

    async def run(self) -> Ended:
        """Run the program. A program that fails is run again with the same seeds.

        Raises:
            ProgramFailed: the program has failed `--agent_attempts` times.
            GenerationFailed: the engine aborted a request.
        """
        while True:
            try:
                return self._ended(await self._run_program())
            except (ProgramFailed, CallFailed):
                self._attempt += 1
                if self._attempt >= self._setting.options.agent_attempts:
                    raise
            self._begin()

    # --- the program --------------------------------------------------------------------------------------------------

    async def _run_program(self) -> dict[str, Any]:
        """Start the program and answer its requests until it ends. Returns how it ended."""
        timeout_s = self._setting.options.agent_timeout_s
        row = {**self._setting.row, "rollout": self._number}
        try:
            started = await self._ask(
                {"do": "start", "row": row, "model": self._setting.model}, START_ROUNDS * timeout_s + SLACK_S
            )
            self._account.wait_s = started["wait_s"]
            async with asyncio.TaskGroup() as group:
                while (event := await self._ask({"do": "next"}, timeout_s + SLACK_S))["kind"] == "request":
                    self._computing[event["number"]] = group.create_task(self._answer(event))
                for answer in list(self._computing.values()):  # the program has ended, so these replies are not needed
                    answer.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from errors
        finally:
            await self._ask({"do": "end"}, SLACK_S)
        return event

    async def _ask(self, request: dict[str, Any], timeout_s: float, name: str = "") -> dict[str, Any]:
        key = f"{self._setting.prompt_id} {self._number}.{self._attempt}"
        effect = f"{self._number}-{name or request['do']}"
        answer: dict[str, Any] = await self._ctx.call(AGENT, {**request, "key": key}, timeout_s=timeout_s, name=effect)
        return answer

    async def _answer(self, event: Mapping[str, Any]) -> None:
        """Answer one request. A completion that the program did not receive is removed from its sample."""
        number, growth, hurry_s = event["number"], None, None
        self._account.num_requests += event["path"] != "models"
        try:
            body, growth = await self._reply(event)
            status = 200
        except Refused as error:
            self._account.num_refused += 1
            status, body = error.status, error_body(str(error), error.code)
            if isinstance(error, OutOfRoom):
                self._account.at_limit, hurry_s = True, AFTER_LIMIT_S
        finally:
            self._computing.pop(number, None)
        request = {"do": "reply", "number": number, "status": status, "body": body, "hurry_s": hurry_s}
        answer = await self._ask(request, SLACK_S, f"{number}-reply")
        if growth is not None and not answer["is_delivered"]:
            self._account.num_lost += 1
            self._branches.take_back(growth, number)

    async def _reply(self, event: Mapping[str, Any]) -> tuple[dict[str, Any], Grown | None]:
        setting, body, number = self._setting, event["body"], event["number"]
        named: dict[str, Any] = {"model": setting.model, "created": self._created}
        request_id = f"{setting.prompt_id}-{self._number}-{number}"
        if event["path"] == "models":
            return models_body(setting.model, self._ctx.max_model_len, self._created), None
        if self._account.at_limit:
            raise OutOfRoom("the rollout has reached its limit before. It is over.")
        if event["path"] == "generate":
            request = generate_request(body, setting.sampling, model=setting.model, vocab_size=setting.vocab_size)
            branch = self._branches.continued(self._branches.begun_by(request.token_ids))
            async with self._reservation(branch, request.token_ids, request.wishes) as max_tokens:
                completion = await self._generate(request.token_ids, request.wishes, max_tokens, number)
                growth = self._grow(branch, request.token_ids, completion, number, None)
            return generate_body(completion, request, request_id=request_id, **named), growth
        return await self._reply_in_chat(body, number, f"chatcmpl-{request_id}", named)

    async def _reply_in_chat(
        self, body: Any, number: int, request_id: str, named: dict[str, Any]
    ) -> tuple[dict[str, Any], Grown | None]:
        chat = self._chat
        request = chat_request(body, self._setting.sampling, model=self._setting.model)
        branch, token_ids = chat.prompt(request, self._branches.all)
        branch = self._branches.continued(branch or self._branches.begun_by(token_ids))
        wishes = replace(request.wishes, stop=(*request.wishes.stop, *chat.stop(request)))
        async with self._reservation(branch, token_ids, wishes) as max_tokens:
            completion = await self._generate(token_ids, wishes, max_tokens, number)
            message, talk = chat.answered(request, completion, number)
            growth = self._grow(branch, token_ids, completion, number, talk)
        spellings = chat.spellings(completion) if request.returns_logprobs else ()
        return chat_body(completion, request, message, token_ids, spellings, request_id=request_id, **named), growth

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _reservation(self, branch: Branch | None, token_ids: list[int], wishes: Wishes) -> "_Reservation":
        return _Reservation(self, branch, token_ids, wishes)

    async def reserve(self, branch: Branch | None, token_ids: list[int], wishes: Wishes) -> tuple[int, int]:
        """Reserve room for a request: the most tokens that it adds in all, and the most that the policy may sample. Waits while
        open requests may use the room that this request needs.

        Raises:
            OutOfRoom: there is no room for a single token, or for a further sample.
        """
        setting, num_inserted = self._setting, 0
        if branch is not None:
            num_inserted = len(token_ids) - len(branch.ledger.token_ids)
        if branch is not None and branch in self._branches.all:
            branch.is_busy = True
        elif len(self._branches.all) + self._num_begun >= setting.options.agent_max_samples:
            raise OutOfRoom(
                f"the prompt goes on where none of the {setting.options.agent_max_samples} samples of this rollout ends, and "
                "there may be no further sample (--agent_max_samples)"
            )
        else:
            self._num_begun += 1
        try:
            async with self._room:
                while True:
                    num_sampled = self._most_tokens(len(token_ids), num_inserted, wishes)
                    room = setting.sampling.max_tokens - self._branches.num_response_tokens - self._reserved
                    if num_inserted + num_sampled <= room:
                        self._reserved += num_inserted + num_sampled
                        return num_inserted + num_sampled, num_sampled
                    await self._room.wait()
        except BaseException:
            self._free(branch)
            raise

    def _most_tokens(self, num_prompt_tokens: int, num_inserted: int, wishes: Wishes) -> int:
        """Tokens that may be sampled if no other request is open."""
        limit, longest = self._setting.sampling.max_tokens, self._ctx.max_model_len
        num_tokens = self._branches.num_response_tokens
        room = limit - num_tokens - num_inserted
        if room < 1:
            raise OutOfRoom(
                f"the rollout may have {limit} tokens in all (--response_length), {num_tokens} are there, and this prompt adds "
                f"{num_inserted}"
            )
        if num_prompt_tokens >= longest:
            raise OutOfRoom(
                f"a prompt of {num_prompt_tokens} tokens, and prompt and response together may have {longest} "
                "(--max_prompt_token_length, and the longest of --response_length, --eval_response_length and --eval_sets)"
            )
        return min(wishes.max_tokens or room, room, longest - num_prompt_tokens)

    async def release(self, branch: Branch | None, num_tokens: int) -> None:
        """Give a reservation back. From now on the tokens that the request added count as tokens of the samples."""
        self._reserved -= num_tokens
        self._free(branch)
        async with self._room:
            self._room.notify_all()

    def _free(self, branch: Branch | None) -> None:
        if branch is not None and branch.is_busy:
            branch.is_busy = False
        else:  # a new sample, or a copy of another one
            self._num_begun -= 1

    async def _generate(self, token_ids: list[int], wishes: Wishes, max_tokens: int, number: int) -> Completion:
        sampling = replace(
            self._setting.sampling,
            n=1,
            max_tokens=max_tokens,
            stop=tuple(dict.fromkeys([*self._setting.sampling.stop, *wishes.stop])),
            seed=self._seed(number, wishes),
        )
        (completion,) = await self._ctx.generate(token_ids, sampling, name=f"{self._number}-generate-{number}")
        self._account.num_prompt_tokens += len(token_ids)
        return cut_behind(completion, wishes.stop_token_ids)

    def _seed(self, number: int, wishes: Wishes) -> int:
        """The seed of a request. If the program asks for the same seed twice, both requests get the same seed, which differs from
        rollout to rollout."""
        label = number if wishes.seed is None else f"asked {wishes.seed}"
        return random.Random(f"{self._ctx.seed} {self._number} {label}").getrandbits(62)

    def _grow(
        self, branch: Branch | None, token_ids: list[int], completion: Completion, number: int, talk: Talk | None
    ) -> Grown:
        return self._branches.grow(branch, token_ids, completion, number=number, talk=talk)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _ended(self, event: Mapping[str, Any]) -> Ended:
        """The samples of a program that has ended.

        Raises:
            ProgramFailed: the program did not end as it should.
        """
        account = self._account
        if event["kind"] == "lost":
            raise ProgramFailed(f"{self._program}: {event['why']}")
        verdict = verdict_of(event["last_line"])
        if not account.at_limit:
            self._check_end(event, verdict)
        account.program_s = event["idle_s"]
        account.has_reward = verdict is not None and verdict.reward is not None
        account.metrics = verdict.metrics if verdict else {}
        samples = self._branches.samples(
            finish_reason="length" if account.at_limit else None, reward=verdict.reward if verdict else None
        )
        if not samples:
            why = "the first request had no room" if account.at_limit else "it ended without a completion"
            raise ProgramFailed(f"{self._program}: {why}{_quoted(event['errors'])}")
        account.num_samples = len(samples)
        spans = self._branches.spans
        account.num_policy_tokens = sum(len(span.token_ids) for span in spans if span.is_sampled)
        account.num_inserted_tokens = sum(len(span.token_ids) for span in spans if not span.is_sampled)
        return Ended(samples, account)

    def _check_end(self, event: Mapping[str, Any], verdict: "Verdict | None") -> None:
        options = self._setting.options
        if event["is_late"]:
            why = f"it ran longer than {options.agent_timeout_s:g} s (--agent_timeout_s)"
        elif event["code"] != 0:
            why = f"it ended with code {event['code']}"
        elif options.agent_prints_reward and (verdict is None or verdict.reward is None):
            line = event["last_line"][:LONGEST_CAUSE]
            why = f'its last line is not {{"reward": …}} (--agent_prints_reward) but {line!r}'
        else:
            return
        raise ProgramFailed(f"{self._program}: {why}{_quoted(event['errors'])}")

    @property
    def _program(self) -> str:
        """Command and row of the program, for messages."""
        place = self._setting.row.get("place")
        return f"{self._setting.options.agent_command} ({place})" if place else str(self._setting.options.agent_command)


class _Reservation:
    """Room for one request, given back at the end."""

    def __init__(self, rollout: AgentRollout, branch: Branch | None, token_ids: list[int], wishes: Wishes) -> None:
        self._rollout = rollout
        self._branch = branch
        self._token_ids = token_ids
        self._wishes = wishes
        self._num_tokens = 0

    async def __aenter__(self) -> int:
        """Returns the tokens that may be sampled."""
        self._num_tokens, num_sampled = await self._rollout.reserve(self._branch, self._token_ids, self._wishes)
        return num_sampled

    async def __aexit__(self, *_: object) -> None:
        await self._rollout.release(self._branch, self._num_tokens)


def cut_behind(completion: Completion, stop_token_ids: frozenset[int]) -> Completion:
    """The completion up to and including the first of the stop tokens."""
    ends = np.flatnonzero(np.isin(completion.token_ids, list(stop_token_ids))) if stop_token_ids else []
    if not len(ends) or ends[0] + 1 == len(completion.token_ids):
        return replace(completion, finish_reason="stop") if len(ends) else completion
    length, spans = int(ends[0]) + 1, []
    budget = length
    for version, num_tokens in completion.version_spans:
        spans.append((version, min(num_tokens, budget)))
        budget -= spans[-1][1]
    version_spans = merged([span for span in spans if span[1]])
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        finish_reason="stop",
        version_spans=version_spans,
    )


def verdict_of(line: str) -> Verdict | None:
    """The verdict in a program's last line, such as `{"reward": 0.5, "metrics": {"turns": 3}}`; None for any other line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or "reward" not in values:
        return None
    metrics = values.get("metrics")
    numbers = {
        name: number
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if (number := finite(value)) is not None
    }
    return Verdict(finite(values["reward"]), numbers)


def _quoted(errors: str) -> str:
    return f"; it said: {errors[-LONGEST_CAUSE:]}" if errors else ""
