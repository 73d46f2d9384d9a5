"""`python -m open_instruct.chat`: finds the model, and shows it what training showed it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TINY_MODEL, make_args

from open_instruct import chat
from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_model import NoModel, facts_of_run, model_directory
from open_instruct.run.options_file import write_options

TOOLS_MODEL = TINY_MODEL.parent / "tiny_tools_model"


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """The directory of a run that saved models, a checkpoint, and its options."""
    (tmp_path / "system.txt").write_text("Answer with a number.")
    options: dict[str, Any] = {"temperature": 0.7, "stop_strings": ["\n\n"], "response_length": 24}
    write_options(
        make_args(output_dir=str(tmp_path), system_prompt_override_file=str(tmp_path / "system.txt"), **options)
    )
    shutil.copytree(TINY_MODEL, tmp_path / "step_000005")
    shutil.copytree(TINY_MODEL, tmp_path / "model", copy_function=shutil.copy)
    checkpoint = tmp_path / "checkpoint_states" / "step_000005"
    (checkpoint / "global_step5").mkdir(parents=True)
    (checkpoint / "run_state.json").write_text("{}")
    (checkpoint / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    return tmp_path


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    code = chat.main([*words, "--device", "cpu"])
    return code, *capsys.readouterr()


def test_a_run_s_newest_model_is_taken(output_dir: Path) -> None:
    assert model_directory(str(output_dir)) == str(output_dir / "model")
    (output_dir / "step_000009").mkdir()
    shutil.copy(TINY_MODEL / "config.json", output_dir / "step_000009")  # written now, by a longer run
    assert model_directory(str(output_dir)) == str(output_dir / "step_000009")
    assert model_directory(str(output_dir / "step_000005")) == str(output_dir / "step_000005")


def test_what_is_no_model_is_refused_with_the_cure(output_dir: Path) -> None:
    for place in ("checkpoint_states", "checkpoint_states/step_000005"):
        with pytest.raises(NoModel, match=f"no model. Chat with {output_dir / 'model'}"):
            model_directory(str(output_dir / place))
    for model in ("model", "step_000005"):
        shutil.rmtree(output_dir / model)
    with pytest.raises(NoModel, match="with --save_freq N"):
        model_directory(str(output_dir / "checkpoint_states"))
    with pytest.raises(NoModel, match="has not written a model yet"):
        model_directory(str(output_dir))
    with pytest.raises(NoModel, match="no such directory"):
        model_directory(str(output_dir / "mode"))


def test_the_run_s_sampling_and_system_prompt_are_the_defaults(output_dir: Path, capsys: pytest.CaptureFixture) -> None:
    words = [str(output_dir), "--message", "What is 17 + 25?", "--json", "--seed", "3"]
    code, out, _ = run(capsys, *words)
    answer = json.loads(out)
    assert code == 0
    assert answer["sampling"] == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 24, "stop": ["\n\n"], "seed": 3}
    assert answer["options_file"] == str(output_dir / "options.json")
    assert answer["messages"][0] == {"role": "system", "content": "Answer with a number."}
    assert json.loads(run(capsys, *words)[1])["tokens"] == answer["tokens"]  # the seed's
    other = json.loads(run(capsys, *words, "--system", "", "--max_tokens", "1", "--stop", "--temperature", "0")[1])
    assert [message["role"] for message in other["messages"]] == ["user"]
    assert len(other["tokens"]) == 1
    assert other["ended"] == "length"


def test_the_prompt_has_the_tokens_of_training(output_dir: Path, capsys: pytest.CaptureFixture) -> None:
    from transformers import AutoTokenizer

    codec = ChatCodec(AutoTokenizer.from_pretrained(TINY_MODEL))
    answer = json.loads(run(capsys, str(output_dir), "--message", "1 + 2?", "--json")[1])
    assert answer["prompt_tokens"] == codec.encode(codec.render(answer["messages"], begins_turn=True))


def test_the_model_answers_piece_by_piece_and_shows_prompt_and_tokens(capsys: pytest.CaptureFixture) -> None:
    """The tiny model writes a number between tags."""
    words = [str(TINY_MODEL), "--message", "What is 31 + 24?", "--temperature", "0", "--max_tokens", "64"]
    plain = run(capsys, *words)[1]
    assert plain.startswith("<answer>")
    shown = run(capsys, *words, "--show_prompt", "--show_tokens")[1]
    assert plain.strip() in shown
    assert "What is 31 + 24?" in shown
    assert shown.count("tokens: ") == 2


def test_a_chat_has_turns_and_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    lines = iter(["1 + 1?", "/prompt", "/reset", "/prompt", "/system Be brief.", "/prompt", "/what", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    code, out, _ = run(capsys, str(TINY_MODEL), "--max_tokens", "4")
    assert code == 0
    with_turn, _, after_reset = out.partition("nothing has been said yet")
    assert "1 + 1?" in with_turn
    assert "Be brief." in after_reset
    assert "1 + 1?" not in after_reset
    assert "/reset   a new conversation" in out


def test_the_tools_of_the_run_are_in_the_prompt(tmp_path: Path) -> None:
    shutil.copytree(TOOLS_MODEL, tmp_path / "model")
    write_options(make_args(output_dir=str(tmp_path), tools=["calculator"], rollout_workflow="conversation"))
    [tool] = facts_of_run(str(tmp_path / "model")).tools
    assert tool["function"]["name"] == "calculator"


def test_an_adapter_is_merged_into_its_base(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With an adapter that shifts a layer the likeliest answer is another one."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_MODEL), LoraConfig(r=2, target_modules=["o_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
    model.save_pretrained(str(tmp_path))
    words = ["--message", "What is 31 + 24?", "--temperature", "0", "--json"]
    base, adapted = (json.loads(run(capsys, str(where), *words)[1]) for where in (TINY_MODEL, tmp_path))
    assert base["prompt_tokens"] == adapted["prompt_tokens"]
    assert base["tokens"] != adapted["tokens"]


def adapter_above(base: str, directory: Path) -> Path:
    """An adapter that changes nothing, above a model of this name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_MODEL), LoraConfig(r=2, target_modules=["o_proj"]))
    model.save_pretrained(str(directory))
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    return directory


def test_the_base_of_an_adapter_is_found_from_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    shutil.copytree(TINY_MODEL, start / "models" / "tiny")
    elsewhere.mkdir()
    monkeypatch.chdir(start)
    write_options(make_args(output_dir=str(start), model_name_or_path="models/tiny"))
    adapter = adapter_above("models/tiny", start / "model")
    monkeypatch.chdir(elsewhere)
    words = [str(adapter), "--message", "1 + 1?", "--max_tokens", "2"]
    assert run(capsys, *words)[0] == 0
    shutil.move(start / "models", start / "moved")
    code, _, error = run(capsys, *words)
    assert code == 2
    assert "the model below the adapter, models/tiny, cannot be loaded" in error
    adapter_above(str(start / "models" / "tiny"), adapter)
    assert "tiny, is not there any more. Where it has moved, write its place into" in run(capsys, *words)[2]


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["--message", "x", "--max_tokens", "0"], "'0' is not a whole number of 1 or more"),
        (["--message", "x", "--temperature", "-1"], "'-1' is not a number of 0 or more"),
        (["--message", "x", "--top_p", "nan"], "'nan' is not a number above 0"),
        (["--message", " "], "the message is empty"),
        (["--json"], "--json and --show_prompt are for one message"),
    ],
)
def test_options_that_cannot_hold_are_refused_before_the_model_is_loaded(
    words: list[str], mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SystemExit) as ended:
        chat.main(["absent", *words])
    assert ended.value.code == 2
    assert mistake in capsys.readouterr().err


def test_what_a_model_or_its_run_lacks_is_one_line(output_dir: Path, capsys: pytest.CaptureFixture) -> None:
    (output_dir / "model" / "model.safetensors").write_bytes(b"torn")
    code, _, error = run(capsys, str(output_dir), "--message", "x")
    assert (code, error.count("cannot be loaded: ")) == (2, 1)
    code, _, error = run(capsys, "out/mime", "--message", "x")
    assert "out/mime is no directory here, and as a name on the hub it cannot be loaded" in error
    file = output_dir / "options.json"
    file.write_text(json.dumps({"in_force": {}}))
    assert facts_of_run(str(output_dir / "model")).doubts[0].startswith(f"{file} has no entry 'directory'")


def test_a_message_comes_from_stdin_without_ray_or_vllm() -> None:
    program = (
        "import sys; from open_instruct import chat; code = chat.main(sys.argv[1:]); "
        "assert not {'ray', 'vllm', 'deepspeed'} & set(sys.modules); sys.exit(code)"
    )
    words = [sys.executable, "-c", program, str(TINY_MODEL), "--max_tokens", "8", "--device", "cpu"]
    done = subprocess.run(words, input="1 + 2?\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_directory_without_a_model_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(capsys, str(tmp_path), "--message", "x")[0] == 2
