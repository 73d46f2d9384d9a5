"""The tokenizer of a run: which revision of which repository."""

import shutil
from pathlib import Path

import pytest
from conftest import TINY_MODEL, make_args

from open_instruct.config.model_checks import load_tokenizer
from open_instruct.data.run_tokenizer import tokenizer_of_run


@pytest.mark.parametrize(
    ("tokenizer", "revision"), [(None, "v2"), ("org/model", "v2"), ("org/other", None), ("/a/directory", None)]
)
def test_the_revision_is_that_of_the_model_only_where_both_are_in_one_repository(
    tokenizer: str | None, revision: str | None
) -> None:
    args = make_args(model_name_or_path="org/model", model_revision="v2", tokenizer_name_or_path=tokenizer)
    assert args.tokenizer_revision == revision


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
