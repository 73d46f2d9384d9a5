"""The model in `assets/tiny_poker_model/` plays as its build script and its record say, and leaves room to learn."""

import dataclasses
import importlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build_tiny_model import RECORD, sha256_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.environments.base import ENVIRONMENTS
from open_instruct.workflows.base import WORKFLOWS

DIRECTORY = Path(__file__).parents[2] / "assets" / "tiny_poker_model"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The build script. What the example registers, which the script imports, is there for these tests alone."""
    registries: list[Any] = [WORKFLOWS, ENVIRONMENTS]
    before = [dict(registry._entries) for registry in registries]
    yield importlib.import_module("build_tiny_poker_model")
    for registry, entries in zip(registries, before, strict=True):
        registry._entries = entries


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((DIRECTORY / RECORD).read_text())


def test_directory_is_small_and_holds_the_recorded_files(record: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*")) < 2_000_000
    assert record["sha256"] == sha256_of(DIRECTORY)


def test_script_has_the_recorded_parameters(script: Any, record: dict[str, Any]) -> None:
    assert record["config"] == dataclasses.asdict(script.CONFIG)
    assert record["habits"] == script.HABITS


def test_demonstrations_are_games_with_the_shares_of_the_habits(script: Any) -> None:
    rng = random.Random(1)
    view = {"legal": ["[fold]", "[call]"]}
    said = Counter(script.turn(view, "K", rng) for _ in range(4000))
    legal = said["[call]"] + said["[fold]"]
    assert legal / 4000 == pytest.approx(script.HABITS["at random"] + script.HABITS["by the card"], abs=0.04)
    assert (said["[check]"] + said["[bet]"]) / 4000 == pytest.approx(script.HABITS["illegal"], abs=0.03)
    assert said["[call]"] - said["[fold]"] == pytest.approx(4000 * script.HABITS["by the card"], abs=200)
    source = script.games(rng)
    for heard in (next(source) for _ in range(50)):
        assert all(len(texts) % 2 == 0 for texts in heard)  # hears and says in turn
        assert heard[1][0].startswith("You are Player 1 in a 1 round game of Kuhn Poker.")


def test_model_says_mostly_moves_and_not_only_valid_ones(script: Any) -> None:
    """Sampled first turns of the player who begins. The share of valid ones is that of the habits, within sampling error."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    model: Any = AutoModelForCausalLM.from_pretrained(DIRECTORY)
    pieces = script.Pieces(tokenizer)
    torch.manual_seed(1)
    valid = 0
    for seed in range(4):
        ids, _ = pieces.prompt(script.PROMPT.format(seed), script.KUHN.play(seed, script.ROUNDS, [])["news"])
        settings = {"max_new_tokens": 16, "do_sample": True, "top_k": 0, "num_return_sequences": 64}
        said = model.generate(torch.tensor([ids]), **settings)[:, len(ids) :]
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        valid += sum(text in ("[check]", "[bet]") for text in texts)
    assert valid / 256 == pytest.approx(0.65, abs=0.15)
