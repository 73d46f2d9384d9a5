"""Command lines and files that nobody should give, and that somebody will: one message each, exit code 2, nothing started."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from open_instruct import fully_async_main, grpo_fast, rc_actor
from open_instruct.config import yaml_files as yaml_door
from open_instruct.config.cli import UsageError
from open_instruct.config.yaml_files import YamlProgram, compose
from open_instruct.data.run_identity import run_identity
from open_instruct.grpo_fast import read_options_and_data
from open_instruct.rc.datasets import load_datasets
from open_instruct.rc.options import read_options
from open_instruct.report.run_summary import PromptCounts, RunSummary, write_summary
from open_instruct.run.run_saving import is_complete

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
        ({"tools": "nosuchtool"}, "--tools nosuchtool: there is no tool"),
        ({"tools": "generic_sandbox"}, "--tools generic_sandbox: it needs Docker"),
        ({"tools": "generic_mcp"}, "--tools generic_mcp: "),
        ({"tools": "nofile.py:x"}, "--tools nofile.py:x: "),
        ({"tools": f"{__file__}:nope"}, f"--tools {__file__}:nope: "),
        ({"tools": f"{__file__}:words"}, "no docstring"),
        ({"tools": __file__}, f"--tools {__file__}: "),
        ({"tools": "calculator", "tool_configs": "{bad"}, "--tool_configs {bad: it is no JSON"),
        ({"tools": "calculator", "tool_configs": "[1]"}, "--tool_configs [1]: it must be a JSON object"),
        ({"tools": "calculator", "tool_configs": ["{}", "{}"]}, "--tool_configs {} {}: there are 1 tools"),
        ({"tools": "calculator", "tool_parser_type": "vllm_nope"}, "vLLM has no parser nope; there are vllm_"),
        (
            {"rollout_workflow": "agent_program", "agent_command": "python /nowhere.py"},
            "--agent_command python /nowhere.py: there is no file /nowhere.py",
        ),
        ({"rollout_workflow": "rc", "rc_turn_weights": "foo", "pack_length": "512"}, "--rc_turn_weights foo: "),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value.values()))[:40],
)
def test_options_of_a_workflow_that_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | list[str]], told: str
) -> None:
    said = mistakes(words(tmp_path, **changes), capsys)
    assert told in said
    assert "  2. " not in said, said


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
        ({"system_prompt_override_file": str(TINY_MODEL / "model.safetensors")}, "Give a file of UTF-8 text"),
        ({"dataset_mixer_list": ["reasoning_gym/spell_backward?data_file=/nowhere/x", "1.0"]}, "'/nowhere/x'"),
        (
            {"dataset_mixer_list": ["reasoning_gym/spell_backward?min_word_len=100&max_word_len=100", "1.0"]},
            "its row at index 0 cannot be made (Cannot choose from an empty sequence)",
        ),
        (
            {
                "dataset_mixer_list": [
                    "reasoning_gym/maze?min_dist=99&max_dist=99&min_grid_size=3&max_grid_size=3",
                    "1.0",
                ]
            },
            "its row at index 0 cannot be made (Could not find suitable path",
        ),
        ({"dataset_mixer_list": ["reasoning_gym/count_primes?max_n=10000000000", "1.0"]}, "takes over 4 GiB"),
    ],
    ids=range(18),
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
        (b"seed: " + b"9" * 5000, "a value cannot be read (Exceeds the limit"),
        (b"seed: 2026-13-01\n", "a value cannot be read (month must be in 1..12)"),
    ],
    ids=["twice", "number", "brackets", "alias", "latin-1", "nested", "digits", "month"],
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


SUM = json.dumps({"question": "1 + 1?", "answer": "2", "metadata": {"source_dataset": "chain_sum"}})


@pytest.mark.parametrize(
    ("verifier", "told"),
    [
        ("reasoning_gym/chain_sun", "no task 'chain_sun'; nearest: chain_sum"),
        ("reasoning_gym", "write reasoning_gym/chain_sum, or another task of it"),
        ("reasoning_gym/", "write reasoning_gym/chain_sum, or another task of it"),
        ("Reasoning_Gym/chain_sum", "write reasoning_gym/chain_sum"),
        ("reasoning_gym/composite", "a row is of one of them"),
        ("reasoning_gym/" + "chain_sum" * 20_000, "no task 'chain_sumchain_sum"),
    ],
    ids=["unknown", "family", "slash", "capitals", "mixture", "long"],
)
def test_rows_of_a_verifier_that_is_none_are_told_at_both_doors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verifier: str, told: str
) -> None:
    """Their ground truth is one that a verifier knows, so that nothing else is wrong with them."""
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "1 + 1?"}]
    path.write_text(json.dumps({"messages": messages, "ground_truth": SUM, "dataset": verifier}))
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: ") as error:
        load_datasets([str(path)])
    for text in (str(error.value), mistakes(words(tmp_path, dataset_mixer_list=[str(path), "1.0"]), capsys)):
        assert "rows.jsonl line 1: " in text
        assert told in text
        assert len(text) < 1000


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


def as_directory(directory: Path) -> None:
    without_weights(directory)
    (directory / "model.safetensors").mkdir()


def with_header(header: bytes, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def with_index(content: str, directory: Path) -> None:
    without_weights(directory)
    (directory / "model.safetensors.index.json").write_text(content)


def with_pickle(content: bytes, directory: Path) -> None:
    without_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(content)


def without_a_tensor(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors")


def with_a_tensor_of_another_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"][:-1]}, directory / "model.safetensors")


def configured(changes: dict[str, object], directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_weights, "no weights in it"),
        (torn, "bytes instead of"),
        (without_header, "model.safetensors is damaged"),
        (without_a_part, "part-2.safetensors is missing"),
        (as_directory, "model.safetensors is damaged"),
        (partial(with_header, b"[" * 100_000), "model.safetensors is damaged"),
        (partial(with_index, "[" * 100_000), "index.json cannot be read"),
        (partial(with_index, '{"weight_map": {"a": 5}}'), "index.json cannot be read"),
        (partial(with_index, '{"weight_map": {}}'), "index.json cannot be read"),
        (partial(with_pickle, b"x"), "pytorch_model.bin is damaged"),
        (without_a_tensor, "its weights lack model.norm.weight."),
        (
            with_a_tensor_of_another_shape,
            "model.norm.weight has the shape [127] in its weights, and [128] by its config",
        ),
        (partial(configured, {"vocab_size": 5}), "its tokenizer makes tokens up to 375, and the model knows 5"),
        (partial(configured, {"vocab_size": 0}), "its tokenizer makes tokens up to 375, and the model knows 0"),
        (partial(configured, {"num_attention_heads": 0}), "make no model (integer division or modulo by zero)"),
        (
            partial(configured, {"model_type": "llama", "num_hidden_layers": 10**7, "layer_types": None}),
            "config.json says 10000000 layers, and its weights are",
        ),
    ],
    ids=range(16),
)
def test_models_without_whole_weights_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], told: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(TINY_MODEL, directory)
    damage(directory)
    assert told in mistakes(words(tmp_path, model_name_or_path=str(directory)), capsys)


def test_tokens_that_text_never_becomes_may_be_unknown_to_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3's tokenizer has one for images, which its models of text alone do not know. One that fills rows is needed."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_tokens([f"<unused_{n}>" for n in range(100)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    read_options_and_data(words(tmp_path, tokenizer_name_or_path=str(tmp_path / "tokenizer")))
    tokenizer.pad_token = "<unused_99>"
    tokenizer.save_pretrained(tmp_path / "another")
    told = mistakes(words(tmp_path, tokenizer_name_or_path=str(tmp_path / "another")), capsys)
    assert "and the model knows 384" in told


@pytest.mark.parametrize(
    "state",
    [
        *("", "[]", "{}", '{"identity": null}', '{"identity": {}, "progress": 3}', '{"format": 7}'),
        '{"identity": {}, "progress": {}, "evaluation_of": null}',
        '{"identity": {"seed": 1}, "progress": {}}',
        '{"identity": {"seed": 1}, "progress": {"of_the_future": 1}, "evaluation_of": null}',
    ],
)
def test_checkpoints_that_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    directory = tmp_path / "out" / "checkpoint_states" / "step_000002"
    directory.mkdir(parents=True)
    (directory / "run_state.json").write_text(state)
    assert "step_000002" in mistakes(words(tmp_path), capsys)


def write_checkpoint(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda state: None) -> None:
    """A checkpoint of step 2 of the run that `words` starts, but for `change`."""
    args, inputs = read_options_and_data(words(tmp_path))
    state = {
        "identity": run_identity(args, inputs),
        "progress": {"training_step": 2},
        "evaluation_of": None,
        "format": 2,
    }
    state = json.loads(json.dumps(state))
    change(state)
    directory = tmp_path / "out" / "checkpoint_states" / "step_000002"
    directory.mkdir(parents=True)
    (directory / "run_state.json").write_text(json.dumps(state))


def test_a_whole_state_is_gone_on_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, lambda state: state.update(evaluation_of=2))
    read_options_and_data(words(tmp_path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(files=5), "does not list its files"),
        (lambda state: state.update(files=["a"]), "does not list its files"),
        (lambda state: state.update(format=True), "is of format True"),
        (lambda state: state.update(format=1.0), "is of format 1.0"),
        (lambda state: state.update(evaluation_of=True), "does not say which evaluation was under way"),
        (lambda state: state.update(evaluation_of=-1), "does not say which evaluation was under way"),
        *(
            (lambda state, step=step: state["progress"].update(training_step=step), "does not say where that run stood")
            for step in ("two", None, float("nan"), -5, True)
        ),
        (lambda state: state["progress"].update(wall_seconds=float("inf")), "does not say where that run stood"),
        (lambda state: state["progress"].update(training_step=7), "is of step 7, and its directory of step 2"),
        (lambda state: state["progress"].clear(), "is of step None, and its directory of step 2"),
        (lambda state: state.update(identity={"junk": 1}), "does not say of which run it is"),
        *(
            (lambda state, key=key: state["identity"].pop(key), "does not say of which run it is")
            for key in ("texts", "tokenizer", "train", "eval")
        ),
        *(
            (lambda state, part=part: state["identity"].update(part), "does not say of which run it is")
            for part in (
                *({"options": 5}, {"options": None}, {"options": {}}, {"options": {"junk": 1}}, {"eval": 3}),
                *(
                    {"train": 3},
                    {"train": {}},
                    {"train": None},
                    {"texts": {"a": 1}},
                    {"tokenizer": None},
                    {"tokenizer": []},
                ),
            )
        ),
    ],
    ids=range(30),
)
def test_states_that_are_not_whole_or_not_of_this_program_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], told: str
) -> None:
    write_checkpoint(tmp_path, change)
    said = mistakes(words(tmp_path), capsys)
    assert told in said
    assert "step_000002" in said
    assert "1 mistake:" in said


def test_a_state_of_brackets_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "out" / "checkpoint_states" / "step_000002" / "run_state.json").write_text("[" * 100_000)
    assert "run_state.json cannot be read" in mistakes(words(tmp_path), capsys)


def test_a_run_that_ends_before_its_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    assert read_options_and_data(words(tmp_path, total_episodes="8"))[0].num_training_steps == 2
    told = mistakes(words(tmp_path, total_episodes="4"), capsys)
    assert "--total_episodes 4: the run would end after step 1" in told
    assert "Set total_episodes to 8 or more" in told


def test_a_complete_run_that_is_started_again_with_fewer_steps_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "out" / "model").mkdir()
    (tmp_path / "out" / "summary.json").write_text("{}")
    assert grpo_fast.main(words(tmp_path, total_episodes="4")) == 0
    assert "This run is complete." in capsys.readouterr().out


def test_a_longer_run_that_broke_off_at_its_end_is_not_complete(tmp_path: Path) -> None:
    """Its last checkpoint was written, but the model is that of the shorter run."""
    write_checkpoint(tmp_path)
    (tmp_path / "out" / "model").mkdir()
    args, _ = read_options_and_data(words(tmp_path, total_episodes="8"))

    def summary(training_steps: int, checkpoint: str) -> None:
        prompts = PromptCounts(issued=8, consumed=8, dropped={}, reissued=0)
        values = RunSummary(None, None, training_steps, 1.0, 1.0, prompts, str(tmp_path / "out" / checkpoint), None)
        write_summary(tmp_path / "out" / "summary.json", values)

    summary(1, "model")
    assert not is_complete(args)
    summary(2, "checkpoint_states/step_000002")  # a signal came during the last evaluation
    assert not is_complete(args)
    summary(2, "model")
    assert is_complete(args)


def start(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the whole program says, which has to end before Ray starts."""
    with pytest.raises(SystemExit) as end:
        grpo_fast.main(argv)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a" * 300, "File name too long"),
        ("loop", "loop: File exists"),
        ("dangling/x", "dangling"),
        ("/proc/x", "/proc/x"),
    ],
)
def test_output_directories_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").write_text("a file")
    assert told in start(words(tmp_path, output_dir=str(tmp_path / name)), capsys)


@pytest.mark.parametrize("made", ["metrics.jsonl/", "prompts.jsonl/", "logs"])
def test_what_stands_in_the_way_in_an_output_directory_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str
) -> None:
    path = tmp_path / "out" / made
    path.parent.mkdir()
    path.mkdir() if made.endswith("/") else path.write_text("a file")
    assert made.removesuffix("/") in start(words(tmp_path), capsys)


# --- the programs that read a YAML file ----------------------------------------------------------------------------------


def mistakes_of_the_yaml_door(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        fully_async_main.main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("=3", "=3: it names no key"),
        ("trainer.seed=1,2", "trainer.seed=1,2: it has several values"),
        ("trainer.seed=${nowhere.x}", "trainer.seed=${nowhere.x}: Interpolation key 'nowhere.x' not found"),
        ("trainer.exp_name='a", "trainer.exp_name='a: it cannot be read"),
        ("trainer.sede=3", "Did you mean seed?"),
        ("async_training.alerts=hello", "async_training.alerts hello: expected a section"),
        ("trainer.nnodes=1000000000", "trainer.nnodes 1000000000: expected"),
        ("async_training.monitor=ends_at_once.monitor", "it cannot be loaded (SystemExit: 0)"),
        ("trainer.cls=nowhere", "it cannot be loaded"),
        ("rollout.vllm_tensor_parallel_size=two", "rollout.vllm_tensor_parallel_size two: expected one whole number"),
        ("trainer.total_episodes=" + "9" * 5000, "a value cannot be read (Exceeds the limit (4300 digits)"),
        ("a" * 5000 + "=1", "a value cannot be read ([Errno 36] File name too long"),
    ],
    ids=range(12),
)
def test_overrides_that_nobody_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, told: str
) -> None:
    (tmp_path / "ends_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert told in mistakes_of_the_yaml_door([override], capsys)


def test_an_override_may_be_written_with_hydras_signs(tmp_path: Path) -> None:
    program = YamlProgram(
        "program", None, "file", "section.key=value", lambda: ["seed"], "", lambda key: key == "trainer.seed"
    )
    (tmp_path / "file.yaml").write_text("trainer:\n  exp_name: a\n")
    for sign in ("", "+", "++"):
        composed = compose(program, ["--config-path", str(tmp_path), f"{sign}trainer.seed=3"])
        assert composed == {"trainer": {"exp_name": "a", "seed": 3}}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: &a [x, x]\nb: [*a, *a]\n", "line 2: an alias (*a)"),
        (b"a: " + b"[" * 60_000, "over 2000 brackets"),
        ("trainer:\n  output_dir: \u00e4\n".encode("latin-1"), "Save it as UTF-8 text"),
        (b"1: 2\n", "1: expected a section"),
        (b"trainer:\n  1: 2\n", "trainer.1: no such option"),
        (b"trainer:\n  seed: 2\n  seed: 3\n", "line 3: seed stands there twice"),
        (b"trainer:\n  seed: " + b"9" * 5000, "a value cannot be read (Exceeds the limit"),
    ],
    ids=["alias", "brackets", "latin-1", "number", "number in a section", "twice", "digits"],
)
def test_yaml_files_that_nobody_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    assert told in mistakes_of_the_yaml_door(["--config-path", str(tmp_path), "--config-name", "mine"], capsys)


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("me", {"wait_for_server_s": float("nan")}, "me.wait_for_server_s nan: expected 0 or more"),
        ("me", {"request_timeout_s": float("inf")}, "me.request_timeout_s inf: expected 1 or more"),
        ("actor", {"retry_base_delay": float("nan")}, "actor.retry_base_delay nan"),
        ("me", {"llm_urls": "http://host:8000/v1?api_key=x"}, "this is not the address of a server"),
        ("me", {"llm_urls": "http://127.0.0.1:99999/v1"}, "this is not the address of a server"),
        ("me", {"llm_urls": "http:///v1"}, "this is not the address of a server"),
        ("me", {"llm_urls": "http://127.0.0.1:abc"}, "this is not the address of a server"),
        ("me", {"llm_urls": "http://[::1"}, "this is not the address of a server"),
        ("me", {"summarization_llm_urls": f"http://{'a' * 70}.example"}, "this is not the address of a server"),
        ("me", {"api_key_urls": "http://elsewhere:1/v1"}, "the run does not use this server"),
    ],
)
def test_numbers_and_servers_that_nobody_can_wait_for(section: str, values: dict[str, object], told: str) -> None:
    config = yaml_door.compose(rc_actor.YAML_PROGRAM, ["--config-name=test_rc"])
    config[section] |= values
    with pytest.raises(UsageError) as error:
        read_options(config)
    assert told in "\n".join(error.value.mistakes)


@pytest.mark.parametrize("secret", ["se+cret", "se,cret", "se cret"])
@pytest.mark.parametrize("option", ["llm_urls", "summarization_llm_urls", "api_key_urls"])
def test_no_part_of_a_password_is_told(secret: str, option: str) -> None:
    config = yaml_door.compose(rc_actor.YAML_PROGRAM, ["--config-name=test_rc"])
    config["me"] |= {option: f"http://user:{secret}@host:8000"}
    with pytest.raises(UsageError) as error:
        read_options(config)
    told = "\n".join(error.value.mistakes)
    assert "In a password write %2B for +" in told
    assert "se" not in told.replace("server", "")
    assert "cret" not in told


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def load(names):\n    return []\n", "It is called as load(names, seed=…)"),
        ("def load(names, seed):\n    return [1]\n", "not a list of open_instruct.workflows.rc.types.Problem"),
        ("def load(names, seed):\n    raise KeyError('x')\n", "fails (KeyError: 'x')"),
        ("import sys\nsys.exit(0)\n", "it cannot be loaded (SystemExit: 0)"),
    ],
)
def test_loaders_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str) -> None:
    module = f"loader_{abs(hash(body))}"
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    config = yaml_door.compose(rc_actor.YAML_PROGRAM, ["--config-name=test_rc", f"dataset_loader={module}.load"])
    with pytest.raises(UsageError) as error:
        rc_actor.load_problems(read_options(config))
    assert told in "\n".join(error.value.mistakes)
