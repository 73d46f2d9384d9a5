"""Rollouts of conversations with a model that is played: the runner, the pool and the environments' processes are real."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from rc_fakes import codec

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, GenerationResult, PromptRequest, SamplingConfig, TokenStatistics
from open_instruct.workflows.base import Workflow
from open_instruct.workflows.conversations.options import ConversationOptions, own_schemas
from open_instruct.workflows.conversations.workflow import Conversations
from open_instruct.workflows.runner import Answer, EngineFacts, RolloutRunner

TIMEOUT_S = 60.0
Say = Callable[[str, int], str]
"""What the model says: from the whole text so far, with control tokens, and the number of the conversation."""


class PlayedPolicy:
    """Answers each request at once. Keeps what it was given and what it said.

    `<end>` in what is said becomes the tokenizer's end token; without it the turn ends at a stop string.
    """

    def __init__(self, say: Say, chat: ChatCodec) -> None:
        self._say, self._chat = say, chat
        self.prompts: list[np.ndarray] = []
        self.samplings: list[SamplingConfig] = []
        self.completions: list[Completion] = []
        self.version = 0
        self._lock = threading.Lock()

    def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
        number = int(request_id.partition("/")[2].partition("-")[0])
        said = self._say(self._chat.decode_all(prompt_ids.tolist()), number)
        text = said.partition("<end>")[0]
        token_ids = self._chat.encode_continued(text)
        if "<end>" in said:
            token_ids.append(self._chat.tokenizer.eos_token_id)
        is_cut = len(token_ids) > sampling.max_tokens
        token_ids = token_ids[: sampling.max_tokens]
        ids = np.array(token_ids, np.int32)
        logprobs = -np.random.default_rng(abs(hash(text)) % 2**32).random(len(ids), dtype=np.float32)
        spans = [(self.version, len(ids))]
        completion = Completion(ids, logprobs, "length" if is_cut else "stop", spans)
        with self._lock:
            self.prompts.append(prompt_ids)
            self.samplings.append(sampling)
            self.completions.append(completion)
        done: Future[Answer] = Future()
        done.set_result(Answer([completion], TokenStatistics(len(prompt_ids), len(ids), 0.0, 0.0)))
        return done


def json_calls(text: str, _: Any = None) -> list[tuple[str, str]]:
    """The calls in a text like `CALL name {"argument": 1}`."""
    uuid.uuid4()  # vLLM's parsers draw an id for each call
    words = (line.removeprefix("CALL ") for line in text.splitlines() if line.startswith("CALL "))
    return [(name, arguments) for name, _, arguments in (word.partition(" ") for word in words)]


def vllm_parser(_: str, __: Sequence[Mapping[str, Any]]) -> Callable[[str], list[tuple[str, str]]]:
    """Takes the place of vLLM's parsers."""
    return json_calls


class RunnerStage:
    """One runner with a workflow, and a policy that is played.

    Args:
        say: what the model says.
    """

    def __init__(
        self,
        workflow: Workflow,
        say: Say,
        *,
        policy: Callable[[Say, ChatCodec], PlayedPolicy] = PlayedPolicy,
        chat: ChatCodec | None = None,
        max_model_len: int = 2048,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.chat = chat or codec()
        self.workflow = workflow
        self.policy = policy(say, self.chat)
        self.results: list[GenerationResult] = []
        self.errors: list[BaseException] = []
        self._arrived = threading.Condition()
        facts = EngineFacts(0, max_model_len, lambda: self.chat, vllm_parser, max_prompt_tokens)
        self.runner = RolloutRunner(self.workflow, facts, self.policy.submit, self._finish, self._fail)

    def _finish(self, result: GenerationResult) -> None:
        with self._arrived:
            self.results.append(result)
            self._arrived.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._arrived:
            self.errors.append(error)
            self._arrived.notify_all()

    def wait_for(self, num_results: int, limit_s: float = TIMEOUT_S) -> list[GenerationResult]:
        """So many results, in the order of their arrival."""
        with self._arrived:
            enough = self._arrived.wait_for(lambda: len(self.results) >= num_results or self.errors, limit_s)
        if self.errors:
            raise self.errors[0]
        assert enough, f"{len(self.results)} of {num_results} results"
        return self.results

    def close(self) -> None:
        self.runner.close()


S = TypeVar("S", bound=RunnerStage)


@contextmanager
def closing(kind: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """Makes stages, as `kind` does, and closes them at the end."""
    stages: list[S] = []

    def make(*args: Any, **options: Any) -> S:
        stages.append(kind(*args, **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


class Stage(RunnerStage):
    """One runner with conversations.

    Args:
        options: of the conversations.
        say: what the model says.
    """

    def __init__(
        self,
        say: Say,
        *,
        chat: ChatCodec | None = None,
        max_model_len: int = 2048,
        max_prompt_tokens: int | None = None,
        **options: Any,
    ) -> None:
        chosen = ConversationOptions(**options)
        chosen.tool_schemas = own_schemas(chosen)
        lengths = {"max_model_len": max_model_len, "max_prompt_tokens": max_prompt_tokens}
        super().__init__(Conversations(chosen), say, chat=chat, **lengths)

    def request(
        self,
        text: str = "12 + 34 =",
        *,
        n: int = 1,
        max_tokens: int = 512,
        seed: int = 7,
        number: int = 0,
        **facts: Any,
    ) -> PromptRequest:
        messages = facts.pop("messages", [{"role": "user", "content": text}])
        read = self.workflow.row_facts(facts)
        task = {**read, "messages": messages, "ground_truth": "46"}
        prompt = self.chat.encode(self.chat.render(messages, begins_turn=True))
        config = SamplingConfig(max_tokens=max_tokens, n=n, seed=seed)
        return PromptRequest(np.array(prompt, np.int32), config, number, f"train-{number}", 0, task=task)

    def roll_out(self, request: PromptRequest | None = None, **settings: Any) -> GenerationResult:
        """The result of one prompt."""
        number = len(self.results)
        self.runner.start(request or self.request(**settings))
        return self.wait_for(number + 1)[number]
