"""Tokenized datasets are found again only if nothing that they are made from has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY_MODEL, make_args

from open_instruct.config import model_checks
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data import dataset_cache, run_identity, run_inputs
from open_instruct.data.run_inputs import RunInputs, load_inputs
from open_instruct.verifiers import code_verifiers

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1 ="}], "ground_truth": str(n + 1), "dataset": "gsm8k"}
    for n in range(20)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read in full, rather than found."""
    read: list[str] = []
    load = run_inputs.load_prompts
    monkeypatch.setattr(run_inputs, "load_prompts", lambda *a, **k: read.append(a[0][0]) or load(*a, **k))
    monkeypatch.setattr(run_inputs, "WORTH_KEEPING_S", 0.0)
    return read


def loaded(tmp_path: Path, data: Path, **options: Any) -> RunInputs:
    given: dict[str, Any] = {
        "dataset_mixer_list": [str(data), "1.0"],
        "dataset_mixer_eval_list": [],
        "dataset_local_cache_dir": str(tmp_path / "cache"),
    }
    inputs, mistakes = load_inputs(arguments(**given | options))
    assert inputs is not None, mistakes
    return inputs


def arguments(**options: Any) -> GRPOConfig:
    return make_args(**options)


def test_the_same_data_are_found_again(tmp_path: Path, data: Path, reads: list[str]) -> None:
    first = loaded(tmp_path, data)
    again = loaded(tmp_path, data)
    assert len(reads) == 1
    assert again.train_dataset.fingerprint() == first.train_dataset.fingerprint()
    assert [row.raw_query for row in again.train_dataset] == [row.raw_query for row in first.train_dataset]
    assert again.train_dataset[3].ground_truth == "4"
    assert again.reports == first.reports


@pytest.mark.parametrize(
    "options",
    [
        {"max_prompt_token_length": 60},
        {"chat_template_name": "tulu_thinker"},
        {"dataset_mixer_list": [..., "0.5"]},
        {"verifier_modules": ["rewards.py"]},
        {"system_prompt_override_file": "system.txt"},
        {"max_length_verifier_max_length": 7},
        {"dataset_skip_cache": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_else_is_asked_for_is_made_anew(
    tmp_path: Path, data: Path, reads: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(
        "from open_instruct.ground_truth_utils import VerificationResult, VerifierFunction\n"
        "class Kept(VerifierFunction):\n    name = 'kept'\n    def __call__(self, *_): return VerificationResult(1.0)\n"
    )
    Path("system.txt").write_text("Be kind.")
    loaded(tmp_path, data)
    if "dataset_mixer_list" in options:
        options = {"dataset_mixer_list": [str(data), "0.5"]}
    loaded(tmp_path, data, **options)
    assert len(reads) == 2
    loaded(tmp_path, data, **options)
    assert len(reads) == (3 if "dataset_skip_cache" in options else 2)


def test_data_of_conversations_are_kept_too(
    tmp_path: Path, data: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on the tools: on their names and options, and on what a user's file says of them."""
    monkeypatch.chdir(tmp_path)
    function = 'def {name}(x: str) -> str:\n    """{what}.\n\n    Args:\n        x: A text.\n    """\n    return x\n'
    Path("tools_of_mine.py").write_text(function.format(name="echo", what="Says it again"))
    options: dict[str, Any] = {"rollout_workflow": "conversation", "tools": ["tools_of_mine.py:echo"]}
    first = loaded(tmp_path, data, **options)
    again = loaded(tmp_path, data, **options)
    assert len(reads) == 1
    assert again.train_dataset[2].facts == {"messages": ROWS[2]["messages"]}
    assert again.train_dataset.fingerprint() == first.train_dataset.fingerprint()
    loaded(tmp_path, data, **options, pass_tools_to_chat_template=False)
    loaded(tmp_path, data)
    assert len(reads) == 3
    Path("tools_of_mine.py").write_text(function.format(name="echo", what="Says it once more"))
    loaded(tmp_path, data, **options)
    assert len(reads) == 4
    Path("theirs").mkdir()
    Path("theirs/games.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # nobody knows of which files a module consists
        loaded(tmp_path, data, **options, environment_modules=["theirs.games"])
    assert len(reads) == 6


def test_rows_that_change_are_read_again(tmp_path: Path, data: Path, reads: list[str]) -> None:
    loaded(tmp_path, data)
    data.write_text(data.read_text().replace("3 + 1", "5 - 1"))
    assert loaded(tmp_path, data).train_dataset[3].raw_query.count("5 - 1") == 1
    assert len(reads) == 2


def test_code_that_changes_reads_again(
    tmp_path: Path, data: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path, data)
    monkeypatch.setattr(dataset_cache, "_code", lambda: "other code")
    loaded(tmp_path, data)
    assert len(reads) == 2


def test_a_tokenizer_with_another_normalizer_reads_again(tmp_path: Path, data: Path, reads: list[str]) -> None:
    model = shutil.copytree(TINY_MODEL, tmp_path / "model")
    options = {"tokenizer_name_or_path": str(model)}
    first = loaded(tmp_path, data, **options)
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "+"}, "content": "-"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    model_checks._load.cache_clear()  # as in a process that has read no tokenizer yet
    assert loaded(tmp_path, data, **options).train_dataset.fingerprint() != first.train_dataset.fingerprint()
    assert len(reads) == 2


def test_data_of_a_tokenizer_that_is_not_known_in_full_are_not_kept(
    tmp_path: Path, data: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_identity, "_rules_of_backend", lambda _: None)
    for _ in range(2):
        loaded(tmp_path, data)
    assert len(reads) == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", "cut"])
def test_a_broken_file_is_made_anew(tmp_path: Path, data: Path, reads: list[str], content: Any) -> None:
    loaded(tmp_path, data)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-200] if content == "cut" else content)
    assert len(loaded(tmp_path, data).train_dataset) == 20
    assert len(reads) == 2
    loaded(tmp_path, data)
    assert len(reads) == 2


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, data: Path, reads: list[str]) -> None:
    (tmp_path / "file").write_text("")
    assert len(loaded(tmp_path, data, dataset_local_cache_dir=str(tmp_path / "file")).train_dataset) == 20


def test_training_data_depend_on_what_is_held_out(tmp_path: Path, data: Path, reads: list[str]) -> None:
    held = {"dataset_mixer_eval_list": [str(data), "5"], "dataset_mixer_eval_list_splits": ["train"]}
    assert len(loaded(tmp_path, data).train_dataset) == 20
    assert len(loaded(tmp_path, data, **held).train_dataset) == 15
    assert len(loaded(tmp_path, data, **held, hold_out_eval_prompts=False).train_dataset) == 20


@pytest.mark.parametrize("verifier", ["code", ["gsm8k", "code"]])
def test_kept_data_that_this_machine_cannot_score_are_refused(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, verifier: str | list[str]
) -> None:
    """As after `--cache_dataset_only` on a machine with a newer kernel."""
    tests = ["assert f(2) == 4"]
    row = {**ROWS[0], "ground_truth": tests if verifier == "code" else ["2", tests], "dataset": verifier}
    (tmp_path / "code.jsonl").write_text("\n".join(map(json.dumps, [*ROWS, row])))
    loaded(tmp_path, tmp_path / "code.jsonl")
    monkeypatch.setattr(code_verifiers, "missing", lambda: ["Landlock is not there"])
    with pytest.raises(AssertionError, match=r"--dataset_mixer_list .*code\.jsonl 1\.0: .*no jail for that: Landlock"):
        loaded(tmp_path, tmp_path / "code.jsonl")
    assert len(reads) == 1


def test_kept_data_for_a_judge_are_refused_without_its_key(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**ROWS[0], "dataset": "general-quality_ref"}
    (tmp_path / "judged.jsonl").write_text(json.dumps(row))
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    loaded(tmp_path, tmp_path / "judged.jsonl", llm_judge_model="gpt-4.1")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(AssertionError, match="OPENAI_API_KEY"):
        loaded(tmp_path, tmp_path / "judged.jsonl", llm_judge_model="gpt-4.1")


def test_rows_that_follow_the_hash_seed_are_kept_for_each(
    tmp_path: Path, data: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry, most in (("reasoning_gym/ransom_note?size=3", 2), ("reasoning_gym/chain_sum?size=3", 1)):
        reads.clear()
        for seed in "0", "0", "1":
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            loaded(tmp_path, data, dataset_mixer_list=[entry, "1.0"], max_prompt_token_length=2000)
        assert len(reads) == most


def test_arrays_are_the_whole_dataset(tmp_path: Path, data: Path) -> None:
    dataset = loaded(tmp_path, data).train_dataset
    read = type(dataset).from_arrays(dataset.arrays())
    assert read.fingerprint() == dataset.fingerprint()
    assert all(np.array_equal(one.prompt, other.prompt) for one, other in zip(read, dataset, strict=True))
