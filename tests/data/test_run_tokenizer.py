"""The tokenizer of a run: which revision of which repository."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, make_args
from transformers import AutoTokenizer

from open_instruct.config.model_checks import load_tokenizer
from open_instruct.data.run_tokenizer import read_tokenizer, tokenizer_of_run


@pytest.mark.parametrize(
    ("tokenizer", "revision"), [(None, "v2"), ("org/model", "v2"), ("org/other", None), ("/a/directory", None)]
)
def test_the_revision_is_that_of_the_model_only_where_both_are_in_one_repository(
    tokenizer: str | None, revision: str | None
) -> None:
    args = make_args(model_name_or_path="org/model", model_revision="v2", tokenizer_name_or_path=tokenizer)
    assert args.revision_of_tokenizer == revision
    assert dataclasses.replace(args, tokenizer_revision="v9").revision_of_tokenizer == "v9"


@pytest.mark.parametrize(("tokenizer", "revision"), [(None, "v2"), ("org/other", "main")])
def test_engines_are_told_the_tokenizer_s_revision(tokenizer: str | None, revision: str) -> None:
    """Unsaid, vLLM would look for the model's revision in the tokenizer's repository."""
    from open_instruct.run.rollout_manager import engine_options

    args = make_args(model_name_or_path="org/model", model_revision="v2", tokenizer_name_or_path=tokenizer)
    options = engine_options(args, args.device, seed=1, max_model_len=64)
    assert (options.revision, options.tokenizer_revision) == ("v2", revision)


def cache_repository(cache: Path, name: str, revision: str) -> None:
    """A repository in a cache of the hub, of which one revision is there."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = f"{len(name):040d}"
    snapshot = repository / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(TINY_MODEL, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(commit)


def test_a_tokenizer_of_another_repository_is_read_though_the_model_has_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=False)
    cache_repository(tmp_path, "org/a-model", "v2")
    cache_repository(tmp_path, "org/a-tokenizer", "main")
    args = make_args(model_name_or_path="org/a-model", model_revision="v2", tokenizer_name_or_path="org/a-tokenizer")
    assert load_tokenizer(args)[1] == []  # before the start
    assert tokenizer_of_run(args).encode("1 + 1")  # by the controller, the engines and the learner that saves
    assert tokenizer_of_run(make_args(model_name_or_path="org/a-model", model_revision="v2")).encode("1 + 1")


@pytest.mark.parametrize("model", [TINY_MODEL, TINY_MODEL.parent / "tiny_rc_model"])
def test_a_plain_tokenizer_is_read_without_torch(model: Path) -> None:
    """Processes that need the tokenizer alone start four seconds of CPU time sooner."""
    text = "State 12 + 34 =<|end|> \N{SNOWMAN}\n"
    messages = [{"role": "user", "content": text}]
    program = f"""
import json, sys
from open_instruct.data.run_tokenizer import read_tokenizer
tokenizer = read_tokenizer({str(model)!r}, None)
assert "torch" not in sys.modules
ids = tokenizer.apply_chat_template({messages!r}, add_generation_prompt=True, return_dict=False)
print(json.dumps([tokenizer.encode({text!r}), ids, tokenizer.init_kwargs | {{"name_or_path": ""}}], default=str))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    usual = AutoTokenizer.from_pretrained(model)
    ids = usual.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = [usual.encode(text), ids, usual.init_kwargs | {"name_or_path": ""}]
    assert json.loads(printed) == json.loads(json.dumps(expected, default=str))
    assert type(read_tokenizer(str(model), None)) is type(usual)


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "Qwen2Tokenizer"}, {"auto_map": {}}])
def test_any_other_tokenizer_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    plain = {"tokenizer_class": "TokenizersBackend"} if "auto_map" in settings else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain | settings))
    asked = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **_: asked.append(name))
    read_tokenizer(str(tmp_path), None)
    assert asked == [str(tmp_path)]
