"""Command lines and files that nobody should give, and that somebody will: one message each, exit code 2, nothing started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY_MODEL

from open_instruct.grpo_fast import read_options_and_data

SUMS = "reasoning_gym/chain_sum?size=8"


def words(tmp_path: Path, **changes: str | list[str]) -> list[str]:
    options: dict[str, str | list[str]] = {
        "model_name_or_path": str(TINY_MODEL),
        "dataset_mixer_list": [SUMS, "1.0"],
        "output_dir": str(tmp_path / "out"),
        "max_prompt_token_length": "64",
        "response_length": "16",
        "pack_length": "128",
        "num_unique_prompts_rollout": "2",
        "num_samples_per_prompt_rollout": "2",
        "total_episodes": "16",
        "beta": "0.0",
        "load_ref_policy": "False",
    }
    options |= changes
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", *([value] if isinstance(value, str) else value))
    ]


def mistakes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        read_options_and_data(argv)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": "9" * 400}, "--seed"),
        ({"total_episodes": "9" * 5000}, "--total_episodes"),
        ({"learning_rate": "9" * 400}, "out of range"),
        ({"learning_rate": "nan"}, "out of range"),
        ({"progress_timeout_s": "inf"}, "out of range"),
        ({"dataset_mixer_list": [SUMS, str(10**30)]}, "an amount is"),
        ({"dataset_mixer_list": ["x" * 5000, "1.0"]}, "no such file or directory"),
        ({"dataset_mixer_list": ["reasoning_gym/chain_sum?min_terms=" + "[" * 60_000, "1.0"]}, "min_terms"),
        ({"dataset_mixer_list": ["reasoning_gym/chain_sum?size=100000000000", "1.0"]}, "at most 100000000 rows"),
        ({"model_name_or_path": "y" * 5000}, "--model_name_or_path"),
        ({"model_name_or_path": "a\0b"}, "no such directory"),
        ({"num_learners_per_node": "1000000000"}, "has room for"),
        ({"stopped_timeout_s": "0"}, "out of range"),
    ],
    ids=range(13),
)
def test_values_that_no_run_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | list[str]], told: str
) -> None:
    assert told in mistakes(words(tmp_path, **changes), capsys)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"seed: 1\nseed: 2\n", "line 2: seed stands there twice"),
        (b"1: 2\n", "1: no such option"),
        (b"a: " + b"[" * 60_000, "over 2000 brackets"),
        (b'a: &a ["x"]\nb: [*a, *a]\n', "line 2: an alias (*a)"),
        ('output_dir: "\u00e4"\n'.encode("latin-1"), "it cannot be read"),
        (b"seed: [1, {a: 1, a: 2}]\n", "a stands there twice"),
    ],
    ids=["twice", "number", "brackets", "alias", "latin-1", "nested"],
)
def test_files_of_options_that_nobody_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert told in mistakes(["--config", str(tmp_path / "run.yaml"), *words(tmp_path)], capsys)


def test_the_same_key_may_stand_in_two_places(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 5\nvllm_num_engines: 1\n")
    args, _ = read_options_and_data(["--config", str(tmp_path / "run.yaml"), *words(tmp_path)])
    assert args.seed == 5


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def torn(directory: Path) -> None:
    with open(directory / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)


def without_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 1000)


def without_a_part(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_weights, "no weights in it"),
        (torn, "bytes instead of"),
        (without_header, "model.safetensors is damaged"),
        (without_a_part, "part-2.safetensors is missing"),
    ],
)
def test_models_without_whole_weights_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], told: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(TINY_MODEL, directory)
    damage(directory)
    assert told in mistakes(words(tmp_path, model_name_or_path=str(directory)), capsys)


@pytest.mark.parametrize(
    "state", ["", "[]", "{}", '{"identity": null}', '{"identity": {}, "progress": 3}', '{"format": 7}']
)
def test_checkpoints_that_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    directory = tmp_path / "out" / "checkpoint_states" / "step_000002"
    directory.mkdir(parents=True)
    (directory / "run_state.json").write_text(state)
    assert "step_000002" in mistakes(words(tmp_path), capsys)
