"""The files of `examples/` by themselves: what each of them computes, without a run."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from open_instruct.algorithms.losses import LOSSES, LossInputs
from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import EVAL, TRAIN, Completion, PromptRequest, SamplingConfig
from open_instruct.environments.base import ENVIRONMENTS, Turn
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.base import WORKFLOWS, CallParser, Context, Effect, Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is there for its test alone."""
    registries: list[Any] = [LOSSES, ENVIRONMENTS, WORKFLOWS]
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def example(name: str) -> ModuleType:
    sys.modules.pop(next((key for key in sys.modules if key.startswith(f"user_module_{name}_")), ""), None)
    return import_user_module(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_fits_a_screen_or_two_and_begins_with_its_command(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 80
    assert lines[0].startswith(('r"""', '"""'))
    assert any(line.startswith("    python ") for line in lines[1:8])


# --- own_reward.py ----------------------------------------------------------------------------------------------------


def test_rewards_are_of_each_completion() -> None:
    module = example("own_reward")
    texts = ["<answer>46</answer>", "so <answer> 46 </answer>", "46", "<answer>46</answer><answer>47</answer>", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = module.right(completions=completions, answer=[46, 46, 46, 46, None], prompts=[], trainer_state=None)
    assert rewards == [1.0, 1.0, 0.0, 0.0, None]
    assert module.brief(completion_ids=[[1, 2, 3, 4, 5], []], answer=[46, 46]) == [-0.5, 0.0]


# --- own_verifier.py --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>46</answer>", 1.0),
        ("so <answer> 44 </answer>", 0.8),
        ("<answer>-46</answer>", 0.0),
        ("46", 0.0),
        ("<answer>46</answer> or <answer>47</answer>", 0.0),
        ("<answer>4e1</answer>", 0.0),
    ],
)
def test_the_verifier_gives_part_of_the_reward_to_what_is_near(text: str, score: float) -> None:
    assert example("own_verifier").Near()([], text, "46").score == pytest.approx(score)


def test_the_verifier_refuses_labels_that_are_no_numbers() -> None:
    near = example("own_verifier").Near()
    for label in ("many", "nan", None):
        with pytest.raises(ValueError, match=r"could not convert|no finite number"):
            near.check_label(label)
    near.try_label("-11")


# --- own_loss.py ------------------------------------------------------------------------------------------------------


def test_the_loss_tapers_only_the_bad_answers_and_those_as_a_whole() -> None:
    """A row of two answers and a token of a prompt between them: the second answer has become less likely, by 0.5 nats."""
    module = example("own_loss")
    new = torch.tensor([[-1.0, -2.0, 0.0, -1.0, -1.5]], requires_grad=True)
    behaviour = torch.tensor([[-2.0, -2.0, 0.0, -1.0, -1.0]])
    position_ids = torch.tensor([[0, 1, 0, 1, 2]])
    mask = torch.tensor([[True, True, False, True, True]])

    def gradient(first: float, second: float, cap: float) -> list[float]:
        advantages = torch.tensor([[first, first, 0.0, second, second]])
        inputs = LossInputs(new, behaviour, behaviour, advantages, mask, position_ids)
        loss, metrics = module.topr_loss(inputs, module.ToprOptions(topr_cap=cap))
        assert loss.shape == metrics["policy/topr_weight_avg"].shape == (1, 5)
        (values,) = torch.autograd.grad(loss.sum(), new)
        return values[0].tolist()

    fallen = np.exp(-0.5)
    assert gradient(1.0, 1.0, 1.0) == pytest.approx([-1, -1, 0, -1, -1])
    assert gradient(-1.0, -2.0, 1.0) == pytest.approx([1, 1, 0, 2 * fallen, 2 * fallen])
    assert gradient(-1.0, -2.0, 2.0) == pytest.approx(
        [2, 2, 0, 2 * fallen, 2 * fallen]
    )  # e to the 1 is more than the cap


# --- own_environment.py -----------------------------------------------------------------------------------------------


def play(turns: Sequence[str], *, most_tries: int = 3) -> list[float | None]:
    """The reward of each step. Each turn is played in an environment of its own, which goes on from the last dump."""
    module = example("own_environment")

    async def rewards() -> list[float | None]:
        game = module.Tries(most_tries)
        await game.reset({"messages": [{"role": "user", "content": "12 + 34 ="}], "answer": 46}, seed=0)
        given = []
        for turn in turns:
            restored = module.Tries(most_tries)
            restored.load(json.loads(json.dumps(game.dump())))
            game = restored
            observation = await game.step(Turn(turn))
            given.append(observation.reward)
            assert observation.done == (observation.reward is not None)
            assert observation.done or observation.messages[0]["content"].endswith("12 + 34 =")
        assert (await game.finish()).metrics == {"tries": len(turns), "solved": bool(given[-1])}
        return given

    return asyncio.run(rewards())


RIGHT, WRONG = "<answer>46</answer>", "<answer>45</answer>"


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        ([RIGHT], [1.0]),
        ([WRONG, RIGHT], [None, 0.5]),
        (["46", "no", RIGHT], [None, None, 0.25]),
        ([WRONG, WRONG + RIGHT, WRONG], [None, None, 0.0]),
    ],
)
def test_a_later_try_is_worth_less(turns: list[str], rewards: list[float | None]) -> None:
    assert play(turns) == rewards


@pytest.mark.parametrize("name", ["own_environment", "own_reward"])
def test_the_example_writes_the_rows_of_its_command(name: str) -> None:
    words = [sys.executable, str(EXAMPLES / f"{name}.py")]
    output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == 2000
    for row in rows:
        (message,) = row.get("messages") or row["prompt"]
        first, second = map(int, re.findall(r"\d+", message["content"]))
        assert row.get("env_config", row)["answer"] == first + second


# --- own_workflow.py --------------------------------------------------------------------------------------------------


class PlayedContext(Context):
    """An engine that answers with the numbers from 100 on, as many as it may."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, max_model_len=64)
        self.requests: deque[tuple[str, list[int], SamplingConfig]] = deque()
        self._tokens = itertools.count(100)

    @property
    def codec(self) -> ChatCodec:
        raise NotImplementedError

    def vllm_parser(self, name: str, schemas: Sequence[Any]) -> CallParser:
        raise NotImplementedError

    async def _answers(self, num_answers: int, num_tokens: int) -> list[Completion]:
        ids = [np.array([next(self._tokens) for _ in range(num_tokens)], np.int32) for _ in range(num_answers)]
        return [Completion(tokens, -tokens.astype(np.float32), "length", [(7, num_tokens)]) for tokens in ids]

    def _generate(
        self, effect: Effect, prompt_ids: np.ndarray, sampling: SamplingConfig
    ) -> Awaitable[list[Completion]]:
        self.requests.append((str(effect), prompt_ids.tolist(), sampling))
        return self._answers(sampling.n, sampling.max_tokens)

    def _call(self, effect: Effect, tool: str, arguments: Any, timeout_s: float) -> Awaitable[Any]:
        raise NotImplementedError

    def _now(self, effect: Effect) -> float:
        raise NotImplementedError


def roll_out(share: float, seed: int, marker: str = TRAIN) -> tuple[Trajectory, PlayedContext]:
    module = example("own_workflow")
    workflow = module.FromTheMiddle(module.FromTheMiddleOptions(draft_share=share))
    request = PromptRequest(
        np.array([1, 2, 3], np.int32), SamplingConfig(max_tokens=8, n=3), 0, "train-0", 7, marker=marker
    )
    context = PlayedContext(seed)
    return asyncio.run(workflow.run(request, context)), context


def test_endings_of_a_draft_are_trained_on_and_its_beginning_is_not() -> None:
    lengths = set()
    for seed in range(30):
        trajectory, context = roll_out(1.0, seed)
        assert [name for name, _, _ in context.requests] == ["draft-0", "generate-0"]
        given = trajectory.notes
        lengths.add(given)
        beginning = list(range(100, 100 + given))
        assert context.requests[1][1] == [1, 2, 3, *beginning]
        assert len(trajectory.samples) == 3
        assert len({tuple(sample.response_ids.tolist()) for sample in trajectory.samples}) == 3
        for sample in trajectory.samples:
            assert sample.prompt_ids.tolist() == [1, 2, 3]
            assert sample.response_ids[:given].tolist() == beginning
            assert sample.loss_mask is not None
            assert sample.loss_mask.tolist() == [False] * given + [True] * (8 - given)
            assert (sample.logprobs == np.where(sample.loss_mask, -sample.response_ids, 0)).all()
            assert sum(length for _, length in sample.version_spans) == len(sample.response_ids) == 8
    assert lengths == set(range(8))


def test_drafts_are_made_for_their_share_of_the_training_prompts_alone() -> None:
    drafted = [roll_out(0.25, seed)[1].requests[0][0] == "draft-0" for seed in range(200)]
    assert 30 < sum(drafted) < 70
    for share, marker in ((0.0, TRAIN), (1.0, EVAL)):
        trajectory, context = roll_out(share, 1, marker)
        assert [name for name, _, _ in context.requests] == ["generate-0"]
        assert all(sample.loss_mask is not None and sample.loss_mask.all() for sample in trajectory.samples)
