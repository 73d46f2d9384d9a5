"""One conversation: a coroutine that lets the model speak, has its calls answered, and keeps the ledger of tokens.

A conversation occupies nothing in the engine between two of its turns. Every effect goes through the context: `generate`, and
calls of the tool `environment`, whose arguments and answers are plain values.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from open_instruct.data_types import Sample, SamplingConfig
from open_instruct.environments.base import (
    Message,
    Observation,
    Schema,
    ToolCall,
    Turn,
    tool_message,
)
from open_instruct.workflows.base import CallFailed, Context, RolloutFailed
from open_instruct.workflows.conversations.bridge import MAY_BE_LEFT_OUT, Bridge, CannotBridge, is_shown
from open_instruct.workflows.conversations.environment_client import EnvironmentClient, Participant
from open_instruct.workflows.conversations.ledger import Ledger
from open_instruct.workflows.conversations.options import ConversationOptions
from open_instruct.workflows.conversations.tool_parsers import ToolParser


@dataclass(frozen=True)
class Setting:
    """What all conversations about one prompt have in common."""

    prompt_id: str
    prompt_ids: np.ndarray  # (Q,) int32
    messages: Sequence[Message]
    """The row's messages, for prompts that must be rendered again."""
    participants: Sequence[Participant]
    sampling: SamplingConfig
    options: ConversationOptions
    parser: ToolParser
    bridge: Bridge
    max_steps: int

    @property
    def prompt_schemas(self) -> list[Schema]:
        """The tools that the prompt describes."""
        if not self.options.pass_tools_to_chat_template:
            return []
        return [schema for participant in self.participants for schema in participant.schemas]


@dataclass
class Account:
    """The costs of a conversation, for metrics. Plain values."""

    num_turns: int = 0
    num_steps: int = 0
    num_branches: int = 0
    num_restarts: int = 0
    num_restores: int = 0
    """Times that an environment failed and continued from its last state in a fresh process."""
    num_truncated: int = 0
    """Answers of tools whose middle was left out."""
    num_policy_tokens: int = 0
    num_tool_tokens: int = 0
    num_template_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens that were sent to the engine, over all turns."""
    wait_s: float = 0.0
    """Seconds in which the conversation waited for a place in the pool."""
    calls: dict[str, list[float]] = field(default_factory=dict)
    """For each tool or environment: calls, calls with an error, seconds."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics that environments reported at the end, by environment name."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards of all steps and endings, in order."""
    ended_by: str = ""
    """`answer`, `environment`, `steps` or `length`."""

    def called(self, name: str, *, num_calls: int, num_errors: int, seconds: float) -> None:
        counts = self.calls.setdefault(name, [0.0, 0.0, 0.0])
        self.calls[name] = [counts[0] + num_calls, counts[1] + num_errors, counts[2] + seconds]

    @property
    def has_good_output(self) -> bool:
        """Whether there were calls, and all were answered without an error."""
        return bool(self.calls) and not any(errors for _, errors, _ in self.calls.values())


@dataclass(frozen=True)
class Ended:
    """A conversation that is over."""

    samples: list[Sample]
    """One sample, or one for each branch. Only the last sample is judged."""
    account: Account


class Conversation:
    """One of the conversations about a prompt.

    Args:
        number: number of this conversation among the conversations about its prompt, from 0.
    """

    def __init__(self, setting: Setting, ctx: Context, number: int) -> None:
        self._setting = setting
        self._ctx = ctx
        self._number = number
        self._attempt = 0
        self._longest = min(ctx.max_model_len, ctx.max_prompt_tokens + setting.sampling.max_tokens)
        """Most tokens of a sample, prompt and response together."""
        self._ending = ""
        """The control tokens with which the model's last turn ended; empty if it ended without any."""
        self._begin()

    def _begin(self) -> None:
        self._account = Account(num_restarts=self._attempt)
        self._messages = list(self._setting.messages)
        self._is_turn_open = False
        """Whether the model's last turn goes on behind the answers that were written into it."""
        self._ledger = Ledger(self._setting.prompt_ids)
        self._samples: list[Sample] = []
        self._rewards: dict[str, list[float]] = {}
        """Rewards of steps and endings, in order, by the name of the tool or environment."""
        self._asking = EnvironmentClient(
            self._ctx,
            self._setting.participants,
            self._setting.options,
            number=self._number,
            key=f"{self._setting.prompt_id} {self._number}.{self._attempt}",
        )
        self._began_at = self._ctx.now(name=f"{self._number}-begin")

    async def run(self) -> Ended:
        """Hold the conversation. If an environment fails, the conversation begins again in a fresh one, with the same seeds.

        Raises:
            CallFailed: environments have failed `--environment_attempts` times.
        """
        while True:
            try:
                await self._open()
                finish_reason = await self._talk()
                return await self._end(finish_reason)
            except CallFailed:
                await self._asking.release()
                self._attempt += 1
                if self._attempt >= self._setting.options.environment_attempts:
                    raise
            except (Exception, asyncio.CancelledError):
                await self._asking.release()
                raise
            self._begin()

    # --- environments -------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Reset the environments. Their opening messages are added to the prompt."""
        opening, wait_s = await self._asking.lease(self._setting.messages, self._left_s())
        self._account.wait_s += wait_s
        if opening:
            self._messages += opening
            self._ledger = Ledger(self._render())
            if len(self._ledger.prompt_ids) > self._ctx.max_prompt_tokens:
                raise RolloutFailed(
                    f"with what the environment says first the prompt has {len(self._ledger.prompt_ids)} tokens, and "
                    f"--max_prompt_token_length allows {self._ctx.max_prompt_tokens}"
                )

    def _left_s(self) -> float:
        """Seconds until the conversation has taken too long."""
        limit = self._setting.options.conversation_timeout_s
        seconds = limit - (self._ctx.now(name=f"{self._number}-now") - self._began_at)
        if seconds <= 0:
            raise CallFailed(f"a conversation took longer than {limit:g} s (--conversation_timeout_s)")
        return seconds

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _talk(self) -> str:
        """Take turns until the conversation ends. Returns why it ended, as a finish reason."""
        account, limit = self._account, self._setting.max_steps
        while True:
            spoken = await self._speak()
            if spoken is None:
                account.ended_by = "length"
                return "length"
            raw, text, finish_reason = spoken
            calls = self._setting.parser.calls(raw)
            texts = [participant for participant in self._setting.participants if participant.takes_text]
            if (not calls and not texts) or account.num_steps >= limit:
                account.ended_by = "length" if finish_reason != "stop" else "answer" if not calls else "steps"
                return finish_reason
            observation = await self._answer(Turn(text, tuple(calls), finish_reason), texts, limit - account.num_steps)
            if observation.done or (texts and account.num_steps >= limit):
                account.ended_by = "environment" if observation.done else "steps"
                return "stop"
            if not self._insert(observation.messages):
                account.ended_by = "length"
                return "length"

    async def _speak(self) -> tuple[str, str, str] | None:
        """One turn of the model, as text with and without control tokens, and its finish reason; None if there is no room."""
        ids, sampling = self._ledger.token_ids, self._setting.sampling
        num_tokens = min(
            sampling.max_tokens - self._num_response_tokens(),
            self._longest - len(ids),
            self._setting.options.per_turn_max_tokens or sampling.max_tokens,
        )
        if num_tokens < 1:
            return None
        self._left_s()
        account, codec = self._account, self._ctx.codec
        turn = replace(
            sampling,
            n=1,
            max_tokens=num_tokens,
            stop=(*sampling.stop, *self._setting.parser.stop),
            seed=self._seed(account.num_turns),
        )
        (completion,) = await self._ctx.generate(ids, turn, name=f"{self._number}-generate")
        account.num_turns += 1
        account.num_prompt_tokens += len(ids)
        account.num_policy_tokens += len(completion.token_ids)
        self._ledger.sampled(completion)
        token_ids = completion.token_ids.tolist()
        spoken = self._setting.bridge.read_turn(token_ids)
        self._ending = spoken.ending
        if self._is_turn_open:
            self._extend_own_turn(self._setting.bridge.without_end(spoken.raw))
        else:
            self._messages.append({"role": "assistant", "content": spoken.content})
        self._is_turn_open = False
        return spoken.raw, codec.decode(token_ids), completion.finish_reason

    def _seed(self, turn: int) -> int:
        """The seed of a turn. It depends only on the prompt's seed, the conversation and the turn, so that a conversation that
        begins again says the same."""
        return random.Random(f"{self._ctx.seed} {self._number} {turn}").getrandbits(62)

    def _num_response_tokens(self) -> int:
        return sum(len(sample.response_ids) for sample in self._samples) + self._ledger.num_response_tokens

    async def _answer(self, turn: Turn, texts: Sequence[Participant], num_left: int) -> Observation:
        """The answers of tools and environments to a turn. Calls behind the first `num_left` are answered with an error."""
        answers: list[Observation] = []
        for position, call in enumerate(turn.calls):
            answers.append(await self._answer_call(call, turn) if position < num_left else self._refuse(call))
            if answers[-1].done:
                break
        if not any(answer.done for answer in answers):
            for participant in texts:
                self._account.num_steps += 1
                answers.append(await self._step(participant, replace(turn, calls=())))
        return Observation(
            [message for answer in answers for message in answer.messages], None, any(answer.done for answer in answers)
        )

    async def _answer_call(self, call: ToolCall, turn: Turn) -> Observation:
        self._account.num_steps += 1
        if call.problem:
            return self._error(call, "malformed", call.problem)
        for participant in self._setting.participants:
            if call.name in participant.own_names:
                inner = replace(call, name=participant.own_names[call.name])
                observation = await self._step(participant, replace(turn, calls=(inner,)))
                named = [
                    {**message, "name": call.name} if message["role"] == "tool" else message
                    for message in observation.messages
                ]
                return replace(observation, messages=named)
        names = ", ".join(sorted(name for participant in self._setting.participants for name in participant.own_names))
        return self._error(call, "unknown", f"there is no tool {call.name!r:.80}; there are: {names}")

    def _refuse(self, call: ToolCall) -> Observation:
        """The answer to a call for which no step is left."""
        limit = self._setting.max_steps
        return self._error(
            call, "over_limit", f"not carried out, because a conversation may have {limit} calls or steps"
        )

    def _error(self, call: ToolCall, kind: str, text: str) -> Observation:
        """The answer to a call that no tool has carried out. The metrics count it as a call of `kind`."""
        self._account.called(kind, num_calls=1, num_errors=1, seconds=0.0)
        return Observation([tool_message(call.name, f"Error: {text}")])

    async def _step(self, participant: Participant, turn: Turn) -> Observation:
        answer = await self._asking.step(participant, turn, self._left_s())
        self._account.wait_s += answer.wait_s
        self._account.num_restores += answer.was_restored
        self._account.called(
            participant.spec.name,
            num_calls=max(1, len(turn.calls)),
            num_errors=answer.observation.num_errors,
            seconds=answer.seconds,
        )
        self._earn(participant, answer.observation.reward)
        return answer.observation

    def _earn(self, participant: Participant, reward: float | None) -> None:
        if reward is not None:
            self._account.turn_rewards.append(reward)
            self._rewards.setdefault(participant.spec.name, []).append(reward)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _insert(self, messages: Sequence[Message]) -> bool:
        """Add the answers and the beginning of the model's next turn. Returns whether there is room for the next turn."""
        setting, codec = self._setting, self._ctx.codec
        room = setting.sampling.max_tokens - self._num_response_tokens()
        room = min(room, self._longest - len(self._ledger.token_ids))
        messages = self._shortened(messages, setting.options.tool_output_max_tokens or max(1, room // 2))
        only_tools = all(message["role"] == "tool" for message in messages) and (messages or not self._ending)
        if setting.parser.in_own_turn and only_tools:
            text = setting.parser.answer_text(messages)
            token_ids = codec.encode_continued(codec.hidden({"content": text})["content"])
            self._extend_own_turn(text)
            self._is_turn_open = True
        else:
            if setting.bridge.drops_thoughts(self._messages, messages, setting.prompt_schemas):
                return self._branch(messages)
            try:
                token_ids = setting.bridge.suffix(messages, self._ending)
            except CannotBridge as error:
                raise RolloutFailed(str(error)) from error
            self._messages += messages
        self._ledger.inserted(token_ids[: max(room, 0)])
        self._account.num_tool_tokens += min(len(token_ids), max(room, 0))
        return len(token_ids) < room

    def _extend_own_turn(self, text: str) -> None:
        """Append to the model's own turn, so that the text stays part of this turn if the conversation is rendered again."""
        self._messages[-1] = {**self._messages[-1], "content": self._messages[-1]["content"] + text}

    def _shortened(self, messages: Sequence[Message], num_tokens: int) -> list[Message]:
        share = max(1, num_tokens // max(1, len(messages)))
        shorter = []
        for message in messages:
            content = self._ctx.codec.shortened(message["content"], share)
            self._account.num_truncated += content != message["content"]
            shorter.append({**message, "content": content})
        return shorter

    def _branch(self, messages: Sequence[Message]) -> bool:
        """Continue in a new sample, whose prompt is rendered again as a whole because the template changes earlier turns. If
        there is no room for it, the conversation ends in the current sample."""
        self._messages += messages
        prompt_ids = self._render()
        if len(prompt_ids) >= self._longest or self._num_response_tokens() >= self._setting.sampling.max_tokens:
            return False
        self._samples.append(self._ledger.sample(finish_reason="stop", goes_on=True))
        self._ledger = Ledger(prompt_ids)
        self._account.num_branches += 1
        self._account.num_template_tokens += len(prompt_ids)
        return True

    def _render(self) -> list[int]:
        """The prompt for all messages so far. Only the policy's own messages may contain control tokens.

        Raises:
            RolloutFailed: the template refuses the messages, or leaves out what a tool, an environment or the user says.
        """
        codec = self._ctx.codec
        messages = [message if message["role"] == "assistant" else codec.hidden(message) for message in self._messages]
        try:
            text = codec.render(messages, begins_turn=True, tools=self._setting.prompt_schemas)
        except Exception as error:  # a template is a program and may raise anything
            raise RolloutFailed(f"the chat template refuses the conversation: {error}") from error
        for message in messages:
            if message["role"] not in MAY_BE_LEFT_OUT and not is_shown(message["content"], text):
                raise RolloutFailed(
                    f"the chat template leaves out what the role {message['role']!r:.40} says, so the model would never see it. "
                    "Choose another template with --chat_template_name, or --tool_parser_type legacy"
                )
        return codec.encode_hidden(text)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, finish_reason: str) -> Ended:
        account = self._account
        for participant in list(self._asking.leased):
            ending = await self._asking.finish(participant)
            self._earn(participant, ending.reward)
            if ending.metrics:
                account.metrics[participant.spec.name] = dict(ending.metrics)
        reward = None
        if self._rewards:
            takes_last = self._setting.options.reward_aggregator == "last"
            reward = sum(earned[-1] if takes_last else sum(earned) for earned in self._rewards.values())
        self._samples = [replace(sample, environment_reward=reward) for sample in self._samples]
        sample = self._ledger.sample(finish_reason=finish_reason, environment_reward=reward)
        if self._setting.options.only_reward_good_outputs and not account.has_good_output:
            sample = replace(sample, is_judged=False, reward=0.0, environment_reward=None)
        self._samples.append(sample)
        return Ended(self._samples, account)
