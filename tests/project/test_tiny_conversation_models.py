"""The models of the demos of conversations are what their build scripts and their records say, and leave room to learn."""

import dataclasses
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import build_tiny_game_model
import build_tiny_tools_model
import pytest
from build_tiny_model import RECORD, sha256_of
from build_tiny_tools_model import HINT, Pieces
from transformers import AutoTokenizer

ASSETS = Path(__file__).parents[2] / "assets"
BOTH = pytest.mark.parametrize(
    ("name", "script"),
    [("tiny_tools_model", build_tiny_tools_model), ("tiny_game_model", build_tiny_game_model)],
    ids=lambda value: value if isinstance(value, str) else "",
)


def record_of(name: str) -> dict[str, Any]:
    return json.loads((ASSETS / name / RECORD).read_text())


@BOTH
def test_directory_is_small_and_holds_the_recorded_files(name: str, script: ModuleType) -> None:
    assert sum(path.stat().st_size for path in (ASSETS / name).rglob("*")) < 3_000_000
    assert record_of(name)["sha256"] == sha256_of(ASSETS / name)


@BOTH
def test_script_has_the_recorded_parameters(name: str, script: ModuleType) -> None:
    record = record_of(name)
    assert record["config"] == dataclasses.asdict(script.CONFIG)
    assert record.get("heedful_share") == getattr(script, "HEEDFUL_SHARE", None)
    assert record.get("habits") == getattr(script, "HABITS", None)
    assert record.get("thoughtful_share") == getattr(script, "THOUGHTFUL_SHARE", None)


def test_demonstrated_games_are_those_of_textarena_and_mostly_thoughtless() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_game_model")
    rng, pieces = random.Random(1), Pieces(tokenizer)
    thoughts: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(400):
        lowest, highest = build_tiny_tools_model.LOWEST, build_tiny_tools_model.HIGHEST
        (_, *turns) = build_tiny_game_model.game(pieces, rng)
        assert turns[0][1]
        for (said, _), (heard, _) in zip(turns[::2], turns[1::2], strict=False):
            thought, _, guess_text = tokenizer.decode(said, skip_special_tokens=True).rpartition("[")
            guess = int(guess_text.strip("]"))
            assert thought in ("", f"{lowest - 1}-{highest + 1} ")
            thoughts[bool(thought)].append(lowest <= guess <= highest)
            hint = tokenizer.decode(heard)
            if HINT.format("higher") in hint:
                lowest = max(lowest, guess + 1)
            else:
                assert HINT.format("lower") in hint
                highest = min(highest, guess - 1)
    assert all(thoughts[True])
    assert 0.2 < sum(thoughts[False]) / len(thoughts[False]) < 0.6
    assert 0.05 < len(thoughts[True]) / len(thoughts[False]) < 0.2


def test_rows_of_the_game_name_their_environment() -> None:
    for name, number in (("train", build_tiny_game_model.NUM_TRAIN), ("eval", build_tiny_game_model.NUM_EVAL)):
        rows = [json.loads(line) for line in (ASSETS / f"guess_the_number_{name}.jsonl").read_text().splitlines()]
        assert len(rows) == number
        assert {row["env_config"]["only_wins"] for row in rows} == {True}
        assert len({row["messages"][0]["content"] for row in rows}) == number
