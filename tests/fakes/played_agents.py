"""Rollouts of agent programs with a model that is played: runner, server and programs are real."""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_policy import TIMEOUT_S, PlayedPolicy, RunnerStage, Say, closing
from rc_fakes import codec

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import GenerationResult, PromptRequest, Sample, SamplingConfig
from open_instruct.workflows.agents.options import AgentOptions
from open_instruct.workflows.agents.workflow import AgentPrograms
from open_instruct.workflows.runner import Answer

PREAMBLE = """
import json, os, subprocess, sys, time, urllib.error, urllib.request

ROW = json.loads(sys.stdin.readline())
BASE = os.environ["OPENAI_BASE_URL"]
MODEL = os.environ["OPEN_INSTRUCT_MODEL"]

def post(url, body, headers=None, data=None):
    data = json.dumps(body).encode() if data is None else data
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def generate(token_ids, **sampling):
    body = {"model": MODEL, "token_ids": token_ids, "sampling_params": sampling}
    return post(os.environ["OPEN_INSTRUCT_GENERATE_URL"], body)

def chat(messages, **fields):
    return post(BASE + "/chat/completions", {"model": MODEL, "messages": messages, **fields})

def said(reply):
    status, body = reply
    assert status == 200, body
    return body["choices"][0]

def note(**values):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(values) + chr(10))
"""
"""What programs of tests begin with. They use no packages, because starting them takes long."""

TWO_REQUESTS = """
first = said(generate(ROW["prompt_token_ids"], max_tokens=20, logprobs=1))
second = said(generate(ROW["prompt_token_ids"] + first["token_ids"] + [9, 10, 11], max_tokens=20, logprobs=1))
note(replies=[first, second], row=ROW)
"""

BRANCHES = """
ids = ROW["prompt_token_ids"]
a = said(generate(ids, max_tokens=20))["token_ids"]
b = said(generate(ids + [30], max_tokens=20))["token_ids"]
c = said(generate(ids + a + [31], max_tokens=20))["token_ids"]
d = said(generate(ids + a + [32], max_tokens=20))["token_ids"]
print("noise")
print(json.dumps({"reward": 0.25, "metrics": {"turns": 4, "bad": None}}))
"""


def program_in_documents(name: str) -> str:
    """The program of docs/guides/agents.md whose first line names it."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text()
    [found] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if block.startswith(f"# {name}")]
    return found


class GatheringPolicy(PlayedPolicy):
    """Answers two requests once both are there, and all others at once.

    Args:
        after: requests before these two.
    """

    def __init__(self, say: Say, chat: ChatCodec, *, after: int = 0) -> None:
        super().__init__(say, chat)
        self._after = after
        self._held: list[tuple[Future[Answer], Future[Answer]]] = []
        self._has_gathered = False

    def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
        answer = super().submit(request_id, prompt_ids, sampling)
        if self._has_gathered or len(self.prompts) <= self._after:
            return answer
        late: Future[Answer] = Future()
        self._held.append((late, answer))
        if len(self._held) == 2:
            self._has_gathered = True
            for waiting, known in self._held:
                waiting.set_result(known.result())
        return late


class AgentStage(RunnerStage):
    """One runner with agent programs.

    Args:
        program: Python code, which `PREAMBLE` precedes.
        options: of the workflow, without their prefix `agent_`.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        say: Say = lambda *_: "hello there<end>",
        *,
        policy: Callable[[Say, ChatCodec], PlayedPolicy] = PlayedPolicy,
        chat: ChatCodec | None = None,
        max_model_len: int = 2048,
        **options: Any,
    ) -> None:
        self.path = directory / f"agent_{id(self)}.py"
        self.path.write_text(PREAMBLE + textwrap.dedent(program))
        settings: dict[str, Any] = {"timeout_s": 30.0, "attempts": 1, "directory": str(directory), **options}
        chosen = AgentOptions(
            agent_command=f"{sys.executable} -S {self.path}",
            **{f"agent_{name}": value for name, value in settings.items()},
        )
        super().__init__(AgentPrograms(chosen), say, policy=policy, chat=chat, max_model_len=max_model_len)

    def request(self, *, n: int = 1, max_tokens: int = 512, number: int = 0, **facts: Any) -> PromptRequest:
        messages = facts.pop("messages", [{"role": "user", "content": "12 + 34 ="}])
        truth = {"ground_truth": "46"} if self.workflow.options.agent_gets_ground_truth else {}
        task = {**self.workflow.row_facts(facts), "messages": messages, **truth}
        prompt = self.chat.encode(self.chat.render(messages, begins_turn=True))
        config = SamplingConfig(max_tokens=max_tokens, n=n, seed=7)
        return PromptRequest(np.array(prompt, np.int32), config, number, f"train-{number}", 0, task=task)

    def roll_out(self, *, limit_s: float = TIMEOUT_S, **settings: Any) -> GenerationResult:
        """The result of one prompt."""
        number = len(self.results)
        self.runner.start(self.request(**settings))
        return self.wait_for(number + 1, limit_s)[number]


def notes(directory: Path) -> list[dict[str, Any]]:
    """What programs have written to the file that `NOTES` in their environment names."""
    path = directory / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


MakeStage = Callable[..., AgentStage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    """Makes stages, which are closed when the test ends."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    with closing(partial(AgentStage, tmp_path)) as make:
        yield make


def text_of(sample: Sample) -> str:
    return codec().decode_all(sample.response_ids.tolist())


def sampled(sample: Sample) -> tuple[list[int], list[float]]:
    assert sample.loss_mask is not None
    return sample.response_ids[sample.loss_mask].tolist(), sample.logprobs[sample.loss_mask].tolist()


def assert_samples_are_what_the_engine_said(result: GenerationResult, one: AgentStage) -> None:
    """Every trained token, with its log-prob, is from a completion of the engine, and every completion is in one sample, once."""
    said = [(c.token_ids.tolist(), c.logprobs.tolist()) for c in one.policy.completions]
    flat = sorted(pair for ids, logprobs in said for pair in zip(ids, logprobs, strict=True))
    assert sorted(pair for sample in result.samples for pair in zip(*sampled(sample), strict=True)) == flat
    for prompt, completion in zip(one.policy.prompts, one.policy.completions, strict=True):
        whole = [*prompt.tolist(), *completion.token_ids.tolist()]
        texts = [[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] for sample in result.samples]
        assert any(text[: len(whole)] == whole for text in texts)
