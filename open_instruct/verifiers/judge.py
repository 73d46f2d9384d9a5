"""Verifiers that ask a language model, for rows of `general-quality`, `general-factuality` and so on.

The judge is any server that speaks OpenAI's protocol. Hundreds of requests run at once, on the event loop of
`outside_scoring.py`. If the judge cannot be reached, or its answer holds no score, the response is *not scored*.
"""

import asyncio
import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import aiohttp

from open_instruct.config.verifier_options import JudgeOptions, VerifierConfig
from open_instruct.system.cells.places import Places
from open_instruct.verifiers.addresses import check_address, host_of, without_login
from open_instruct.verifiers.base import NotScored, VerificationResult, VerifierFunction
from open_instruct.verifiers.judge_prompts import TASKS, JudgeTask, longest_label, num_characters, question
from open_instruct.verifiers.text_verifiers import judged_part
from open_instruct.verifiers.thoughts import NEVER_ENDS

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
ADDRESS = "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"
OPENAI_HOST = "api.openai.com"
"""OpenAI's server, which refuses requests without a key."""
PROVIDERS = ("openai", "azure", "hosted_vllm")
"""Prefixes of model names in open-instruct's launch lines. Servers do not know these prefixes, so they are removed."""
ATTEMPTS = 3
FIRST_PAUSE_S = 1.0
QUEUES = 10
"""A judgement may wait for its turn as long as this many judgements may take together."""
MOST_BYTES = 4 * 2**20
"""Most bytes of a judge's answer."""
PASSING = frozenset((408, 409, 425, 429))
"""HTTP statuses below 500 after which another attempt may succeed."""


@dataclass(frozen=True)
class Judgement:
    """A judge's answer."""

    text: str
    cost: float
    """US dollars; 0 for an answer from the cache."""


class JudgeClient:
    """Asks one judge, at most `llm_judge_max_concurrency` times at once. All callers that ask the same judge share a client
    (`client_of`), so the limit holds for the judge. Each event loop has its own session: verifiers run in one loop, and evolving
    rubrics in another."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
        self._places = Places(config.llm_judge_max_concurrency)
        self._kept = Path(config.llm_judge_cache_dir) if config.llm_judge_cache_dir else None

    @property
    def model(self) -> str:
        """The judge's name on the server."""
        name = self._config.llm_judge_model or ""
        provider, _, rest = name.partition("/")
        return rest if provider in PROVIDERS else name

    async def ask(self, text: str, *, attempt: int = 0) -> Judgement:
        """The judge's answer to one message. `attempt` is above 0 if an earlier answer could not be used.

        Raises:
            NotScored: the server cannot be reached, refuses the request, or answers nonsense.
        """
        body = self._body(text)
        key = hashlib.sha256(json.dumps([self._address, body, attempt], sort_keys=True).encode()).hexdigest()
        if (answer := self._find(key)) is not None:
            return Judgement(answer, 0.0)
        async with self._places:
            judgement = await self._post(body)
        self._keep(key, judgement.text)
        return judgement

    async def judge(self, task: JudgeTask, *, query: str, response: str, label: object) -> VerificationResult:
        """The judge's score, its cost, and the judge's text.

        Raises:
            NotScored: as in `ask`, or the judge's answers hold no score.
        """
        cost = 0.0
        text = question(task, query=query, response=response, label=label, max_tokens=self.max_question_tokens)
        for attempt in range(ATTEMPTS):
            try:
                judgement = await self.ask(text, attempt=attempt)
            except NotScored as error:
                error.cost += cost
                raise
            cost += judgement.cost
            if (score := task.read(judgement.text)) is not None:
                return VerificationResult(score, cost, judgement.text)
        raise NotScored("the judge's answer holds no score", cost=cost)

    @property
    def max_question_tokens(self) -> int:
        """Most tokens of a question to the judge."""
        return self._config.llm_judge_max_context_length - self._config.llm_judge_max_tokens

    @property
    def longest_wait_s(self) -> float:
        """Longest time that a judgement may take, including the wait for its turn."""
        return QUEUES * ATTEMPTS * (self._config.llm_judge_timeout + 2**ATTEMPTS * FIRST_PAUSE_S)

    def check(self, name: str) -> None:
        """Raises `ValueError` if the verifier `name` has no judge, or a judge that these options cannot reach."""
        config = self._config
        if not config.llm_judge_model:
            raise ValueError(
                f"{name}: no judge is named. Give --llm_judge_model, and its server by --llm_judge_api_base"
            )
        self._check_server(name)
        if self.max_question_tokens <= 0:
            raise ValueError(
                f"{name}: --llm_judge_max_context_length {config.llm_judge_max_context_length} leaves no room beside "
                f"--llm_judge_max_tokens {config.llm_judge_max_tokens}"
            )

    def _check_server(self, name: str) -> None:
        source, base = self._base
        check_address(f"{name}: {source}", base)
        if host_of(base) == OPENAI_HOST and not os.environ.get(KEY):
            raise ValueError(
                f"{name}: --llm_judge_model {self._config.llm_judge_model}: OpenAI's server ({without_login(base)}) needs a key. "
                f"Set {KEY} in the environment, or name another server by --llm_judge_api_base"
            )

    def check_length(self, task: JudgeTask, label: object, name: str) -> None:
        """Raises `ValueError` if a label, called `name`, leaves no room for a response in the question of `task`."""
        length, limit = num_characters(task, label), longest_label(task, self.max_question_tokens)
        if length > limit:
            raise ValueError(
                f"{name} of {length} characters leaves no room for a response in the question to the judge: it may have at most "
                f"{max(limit, 0)}. Shorten it, or raise --llm_judge_max_context_length as far as the judge allows."
            )

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    @property
    def _base(self) -> tuple[str, str]:
        """The option or variable that names the judge's server, and the server's address."""
        if self._config.llm_judge_api_base:
            return "--llm_judge_api_base", self._config.llm_judge_api_base
        return ADDRESS, os.environ.get(ADDRESS) or OPENAI

    @property
    def _address(self) -> str:
        return self._base[1].rstrip("/") + "/chat/completions"

    def _body(self, text: str) -> dict[str, Any]:
        """The body of a request. It has no seed, because vLLM 0.32 on CPU ends at a request with a seed."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self._config.llm_judge_temperature,
            "max_tokens": self._config.llm_judge_max_tokens,
        }

    async def _post(self, body: dict[str, Any]) -> Judgement:
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(self._config.llm_judge_timeout):
                    status, content = await self._exchange(body)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                base = without_login(self._base[1])
                problem = f"the judge at {base} cannot be reached ({type(error).__name__})"
                continue
            if status == 200:
                return self._read(content)
            problem = f"the judge answers with HTTP status {status}"
            if status < 500 and status not in PASSING:
                break
        raise NotScored(problem)

    async def _exchange(self, body: dict[str, Any]) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            connector = aiohttp.TCPConnector(limit=self._config.llm_judge_max_concurrency)
            self._sessions[loop] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        async with self._sessions[loop].post(self._address, json=body, headers=headers) as answer:
            return answer.status, await answer.content.read(MOST_BYTES) if answer.status != 200 else await _whole(
                answer
            )

    def _read(self, content: bytes) -> Judgement:
        try:
            answer = json.loads(content)
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise NotScored(f"the judge's answer is no completion ({type(error).__name__})") from error
        prices = self._config.llm_judge_price_per_million_tokens
        cost = max(sum(price * number for price, number in zip(prices, tokens, strict=True)), 0) / 1e6
        if not isinstance(text, str):
            raise NotScored("the judge's answer holds no text", cost=cost)
        return Judgement(text, cost)

    def _find(self, key: str) -> str | None:
        if self._kept is None:
            return None
        with suppress(OSError, ValueError, LookupError, TypeError):  # an unreadable entry counts as absent
            return str(json.loads((self._kept / key[:2] / key).read_bytes())["text"])
        return None

    def _keep(self, key: str, text: str) -> None:
        if self._kept is None:
            return
        try:
            directory = self._kept / key[:2]
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
                json.dump({"text": text}, file)
            os.replace(file.name, directory / key)
        except OSError as error:
            logger.warning("a judgement could not be kept: %s", error.strerror or error)


_clients: WeakValueDictionary[str, JudgeClient] = WeakValueDictionary()


def client_of(config: VerifierConfig) -> JudgeClient:
    """The client that all callers with these options share."""
    key = repr([getattr(config, option.name) for option in fields(JudgeOptions)])
    return _clients.setdefault(key, JudgeClient(config))


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in answer.content.iter_any():
        content += part
        if len(content) > MOST_BYTES:
            raise aiohttp.ClientPayloadError("too long")
    return bytes(content)


class JudgeVerifier(VerifierFunction):
    """The score that a judge gives. A subclass names the `task`."""

    task = ""

    def __init__(self, verifier_config: VerifierConfig | None = None) -> None:
        super().__init__(f"general-{self.task}", verifier_config=verifier_config)
        self._client = client_of(self.verifier_config)

    @classmethod
    def is_complete(cls) -> bool:
        return bool(cls.task)

    @property
    def outside_timeout_s(self) -> float:
        return self._client.longest_wait_s

    async def async_call(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        answer = judged_part(prediction, query)
        if answer is None:
            return VerificationResult(0.0, reasoning=NEVER_ENDS)
        return await self._client.judge(TASKS[self.task], query=query or "", response=answer, label=label)

    def check_label(self, label: object) -> None:
        self._client.check(self.name)
        if TASKS[self.task].needs_label and label in (None, "", []):
            raise ValueError(f"{self.name}: the judge needs a ground truth")
        self._client.check_length(TASKS[self.task], label, f"{self.name}: a ground truth")

    async def close(self) -> None:
        await self._client.close()


JUDGES = [
    type(
        f"{''.join(map(str.capitalize, task.split('_')))}Judge",
        (JudgeVerifier,),
        {"task": task, "__module__": __name__},
    )
    for task in TASKS
]
"""A verifier for each kind of judgement."""
