"""What is noticed when a run goes on from the checkpoint of another: options, data row by row, tokenizer, system prompt."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY_MODEL, make_args
from dataset_files import PLACE

from open_instruct.data import run_identity
from open_instruct.data.prompt_dataset import PromptDatasetBuilder
from open_instruct.data.run_inputs import load_inputs
from open_instruct.run import checked_inputs
from open_instruct.run.run_saving import checkpoint_store


def row(number: int, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number} + 1 ="}]
    return {"messages": messages, "ground_truth": str(number + 1), "dataset": "gsm8k"} | changes


class Saved:
    """A run whose newest checkpoint was made with five rows to train on and two to evaluate on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.train, self.eval = directory / "train.jsonl", directory / "test.jsonl"
        self.write(self.train, [row(n) for n in range(5)])
        self.write(self.eval, [row(n) for n in (100, 101)])
        args = self.args()
        inputs, mistakes = load_inputs(args)
        assert inputs is not None, mistakes
        self.identity = json.loads(json.dumps(run_identity.run_identity(args, inputs)))
        self.save(self.identity)

    def write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))

    def args(self, **options: Any) -> Any:
        settings: dict[str, Any] = {
            "output_dir": str(self.directory / "out"),
            "total_episodes": 160,
            "dataset_mixer_list": [str(self.train), "1.0"],
            "dataset_mixer_eval_list": [str(self.eval), "1.0"],
            **options,
        }
        return make_args(**settings)

    def save(self, identity: dict[str, Any]) -> None:
        state = {"identity": identity, "progress": {"training_step": 7}, "evaluation_of": None}
        checkpoint_store(self.args()).save(7, state, lambda _: {})

    def start_again(self, **options: Any) -> list[str]:
        """What the same command, apart from `options`, is told."""
        [*_, data_is_that_of_the_run] = checked_inputs.validators([])
        return data_is_that_of_the_run(self.args(**options))


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_the_same_command_goes_on(saved: Saved) -> None:
    assert saved.start_again() == []
    assert saved.start_again(learning_rate=1e-6, total_episodes=640, vllm_num_engines=2, save_freq=5) == []
    assert saved.start_again(model_name_or_path=os.path.relpath(TINY_MODEL)) == []


def test_a_checkpoint_in_another_dtype_is_refused(saved: Saved) -> None:
    """DeepSpeed looks for files of another name then, and the learners would end with its error."""
    assert saved.start_again(model_dtype="float32") == []  # what auto is on CPU
    [mistake] = saved.start_again(model_dtype="bfloat16")
    assert "is of another run: --model_dtype was 'float32', now 'bfloat16'. To go on from it, undo" in mistake
    of_earlier_version = json.loads(json.dumps(saved.identity))
    del of_earlier_version["options"]["model_dtype"]
    saved.save(of_earlier_version)
    assert saved.start_again(model_dtype="bfloat16") == []


def one_row_more(saved: Saved) -> None:
    saved.write(saved.train, [row(n) for n in range(6)])


def one_row_less(saved: Saved) -> None:
    saved.write(saved.train, [row(n) for n in range(4)])


def two_rows_exchanged(saved: Saved) -> None:
    saved.write(saved.train, [row(n) for n in (1, 0, 2, 3, 4)])


def another_ground_truth(saved: Saved) -> None:
    saved.write(saved.train, [row(n) for n in range(4)] + [row(4, ground_truth="55")])


def another_verifier(saved: Saved) -> None:
    saved.write(saved.train, [row(n) for n in range(4)] + [row(4, dataset="string_matcher")])


def another_evaluation(saved: Saved) -> None:
    saved.write(saved.eval, [row(n) for n in (100, 102)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (one_row_more, "the training data: 5 rows then, 6 rows now"),
        (one_row_less, "the training data: 5 rows then, 4 rows now"),
        (
            two_rows_exchanged,
            "the training data: 5 rows as then, but with other prompts and ground truths or in another order",
        ),
        (another_ground_truth, "the training data: 5 rows as then, but with other ground truths or in another order"),
        (another_verifier, "the training data: 5 rows as then, but with other verifiers or in another order"),
        (another_evaluation, "the evaluation data: 2 rows as then, but with other prompts and ground truths"),
    ],
)
def test_changed_data_is_told_in_words_and_refused(saved: Saved, change: Callable[[Saved], None], told: str) -> None:
    change(saved)
    [mistake] = saved.start_again()
    checkpoint = saved.directory / "out" / "checkpoint_states" / "step_000007"
    assert mistake.startswith(f"--output_dir {saved.directory / 'out'}: {checkpoint} is of another run: {told}")
    assert mistake.endswith("To go on from it, undo these changes; to start anew, choose another --output_dir.")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0.7}, "--temperature was 1.0, now 0.7"),
        ({"response_length": 31}, "--response_length was 32, now 31"),
        ({"stop_strings": ["\n"]}, "--stop_strings was [], now ['\\n']"),
        ({"rollout_workflow": "rc"}, "--rollout_workflow was 'single_turn', now 'rc'"),
        ({"dataset_mixer_eval_list": []}, "; the evaluation data: 2 rows then, none now"),
    ],
)
def test_changed_meaning_of_samples_is_refused(saved: Saved, options: dict[str, Any], told: str) -> None:
    assert told in "\n".join(saved.start_again(**options))


@pytest.mark.parametrize(
    "options", [{"rollout_workflow": "conversation"}, {"rollout_workflow": "conversation", "tools": ["calculator"]}]
)
def test_another_workflow_is_the_cause_and_not_the_data(saved: Saved, options: dict[str, Any]) -> None:
    """A conversation reads more of each row, so its rows have other fingerprints, of the same file."""
    [mistake] = saved.start_again(**options)
    assert "--rollout_workflow was 'single_turn', now 'conversation'" in mistake
    assert "the training data" not in mistake
    assert "the evaluation data" not in mistake


def test_a_run_goes_on_when_its_project_has_moved(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.directory)
    assert (
        saved.start_again(dataset_mixer_list=["train.jsonl", "1.0"], dataset_mixer_eval_list=["test.jsonl", "1.0"])
        == []
    )
    (saved.directory / "data").mkdir()
    saved.train.rename("data/rows.jsonl")
    assert saved.start_again(dataset_mixer_list=["data/rows.jsonl", "1.00"]) == []


def two_sources(saved: Saved) -> dict[str, Any]:
    """Options of a run that has two sources, of which the newest checkpoint now is."""
    saved.write(more := saved.directory / "more.jsonl", [row(n) for n in range(10, 15)])
    options = {"dataset_mixer_list": [str(saved.train), "1.0", str(more), "1.0"]}
    inputs, _ = load_inputs(args := saved.args(**options))
    saved.save(json.loads(json.dumps(run_identity.run_identity(args, inputs))))
    return options


def test_splits_are_compared_as_they_apply_to_each_source(saved: Saved) -> None:
    options = two_sources(saved)
    assert saved.start_again(**options, dataset_mixer_list_splits=["train", "train"]) == []
    [mistake] = saved.start_again(**options, dataset_mixer_list_splits=["train", "test"])
    more = options["dataset_mixer_list"][2]
    assert f"another run: --dataset_mixer_list_splits: the split of {more} was 'train', now 'test'. To go on" in mistake


def test_amounts_are_compared_even_if_the_rows_are_the_same(saved: Saved) -> None:
    [mistake] = saved.start_again(dataset_mixer_list=[str(saved.train), "5"])
    assert f"another run: --dataset_mixer_list: the amount of {saved.train} was 1.0, now 5. To go on" in mistake
    saved.write(saved.train, [row(0)])
    inputs, _ = load_inputs(args := saved.args())
    saved.save(json.loads(json.dumps(run_identity.run_identity(args, inputs))))
    [mistake] = saved.start_again(dataset_mixer_list=[str(saved.train), "1"])
    assert f"the amount of {saved.train} was 1.0, now 1. To go on" in mistake


def test_sources_in_another_order_or_number_are_refused_with_their_names(saved: Saved) -> None:
    options = two_sources(saved)
    one, _, other, _ = then = options["dataset_mixer_list"]
    now = [other, "1.0", one, "1.0"]
    [mistake] = saved.start_again(dataset_mixer_list=now)
    assert (
        f"another run: --dataset_mixer_list was {then}, now {now}; the training data: 10 rows as then, but" in mistake
    )
    saved.write(joined := saved.directory / "joined.jsonl", [row(n) for n in (*range(5), *range(10, 15))])
    now = [str(joined), "1.0"]
    [mistake] = saved.start_again(dataset_mixer_list=now)
    assert f"another run: --dataset_mixer_list was {then}, now {now}. To go on" in mistake


def test_data_of_another_file_are_refused_with_its_name(saved: Saved) -> None:
    saved.write(other := saved.directory / "other.jsonl", [row(n) for n in range(20, 25)])
    [mistake] = saved.start_again(dataset_mixer_list=[str(other), "1.0"])
    names = f"--dataset_mixer_list was {[str(saved.train), '1.0']}, now {[str(other), '1.0']}"
    assert f"another run: {names}; the training data: 5 rows as then, but with other prompts" in mistake


def test_another_column_of_messages_is_told_by_its_option_alone(saved: Saved) -> None:
    rows = [row(n, chat=[{"role": "user", "content": f"What is {n} + 1?"}]) for n in range(5)]
    for path, some in ((saved.train, rows), (saved.eval, [row(n, chat=row(n)["messages"]) for n in (100, 101)])):
        saved.write(path, some)
    assert saved.start_again() == []
    [mistake] = saved.start_again(sft_messages_key="chat")
    assert "another run: --sft_messages_key was 'messages', now 'chat'. To go on" in mistake


def test_a_system_prompt_is_compared_by_its_text(saved: Saved) -> None:
    one, other = saved.directory / "one.txt", saved.directory / "other.txt"
    one.write_text("Be brief.")
    [mistake] = saved.start_again(system_prompt_override_file=str(one))
    assert "another run: --system_prompt_override_file was not given, now it is. To go on" in mistake
    inputs, _ = load_inputs(args := saved.args(system_prompt_override_file=str(one)))
    saved.save(run_identity.run_identity(args, inputs))
    other.write_text("Be brief.")
    assert saved.start_again(system_prompt_override_file=str(other)) == []
    other.write_text("Be long.")
    [mistake] = saved.start_again(system_prompt_override_file=str(other))
    assert "another run: --system_prompt_override_file holds another text now. To go on" in mistake


def test_a_tokenizer_is_compared_by_what_it_does_not_by_its_place(saved: Saved) -> None:
    moved = saved.directory / "tokenizer"
    shutil.copytree(TINY_MODEL, moved)
    assert saved.start_again(tokenizer_name_or_path=str(moved)) == []
    config = json.loads((moved / "tokenizer_config.json").read_text())
    for place in (moved / "tokenizer_config.json", moved / "chat_template.jinja"):
        place.unlink(missing_ok=True)
    template = "{% for m in messages %}Q: {{ m.content }}{% endfor %}A:"
    changed = saved.directory / "changed"
    shutil.copytree(moved, changed)
    (changed / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    [mistake] = saved.start_again(tokenizer_name_or_path=str(changed))
    assert f"the tokenizer ({TINY_MODEL} then, {changed} now) has another chat template. To go on" in mistake
    content = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    content["model"]["merges"].reverse()
    merged = shutil.copytree(TINY_MODEL, saved.directory / "merged")
    (merged / "tokenizer.json").write_text(json.dumps(content))
    [mistake] = saved.start_again(tokenizer_name_or_path=str(merged))
    assert f"the tokenizer ({TINY_MODEL} then, {merged} now) has other rules, such as merges or a norm" in mistake


def test_prompts_of_another_day_are_no_other_prompts(saved: Saved) -> None:
    """A chat template may write the date into each prompt: a run that goes on tomorrow is the same run."""
    now = json.loads(json.dumps(saved.identity))
    now["train"]["prompts"] = "of today"
    assert run_identity.differences(saved.identity, now) != []
    saved.identity["tokenizer"]["date"], now["tokenizer"]["date"] = "2026-03-01", "2026-03-02"
    assert run_identity.differences(saved.identity, now) == []
    now["options"]["dataset_mixer_list"] = ["/moved/to/train.jsonl", "1.0"]
    assert run_identity.differences(saved.identity, now) == []
    now["options"]["dataset_mixer_list"] = [str(saved.directory / "others.jsonl"), "1.0"]
    [told] = run_identity.differences(saved.identity, now)  # nothing else shows that the prompts are others
    assert told.startswith("--dataset_mixer_list was [")
    now["train"]["ground_truths"] = "others"
    assert "other ground truths" in run_identity.differences(saved.identity, now)[1]


def test_a_checkpoint_of_an_earlier_version_is_compared_as_far_as_it_says(saved: Saved) -> None:
    """It holds options alone, fewer than now, and no word of the data."""
    earlier = {name: saved.identity["options"][name] for name in ("seed", "deepspeed_stage", "dataset_mixer_list")}
    saved.save(earlier)
    assert saved.start_again() == []
    assert not run_identity.says_which_data(earlier)
    assert run_identity.says_which_data(saved.identity)
    one_row_more(saved)
    assert saved.start_again() == []  # the resumed run warns that it is not known
    [mistake] = saved.start_again(seed=9)
    assert "another run: --seed was 1, now 9. To go on" in mistake
    saved.train.rename(renamed := saved.directory / "renamed.jsonl")
    [mistake] = saved.start_again(dataset_mixer_list=[str(renamed), "1.0"])  # it has nothing but the name
    assert f"another run: --dataset_mixer_list was {[str(saved.train), '1.0']}, now " in mistake


@pytest.mark.parametrize("junk", [5, None, ["a"], ["a", "many"], [["a"], {}]])
def test_a_damaged_mixer_list_of_a_checkpoint_is_told_as_it_is(saved: Saved, junk: Any) -> None:
    saved.identity["options"]["dataset_mixer_list"] = junk
    saved.save(saved.identity)
    [mistake] = saved.start_again()
    assert f"another run: --dataset_mixer_list was {junk!r}, now " in mistake


def test_where_the_data_cannot_be_read_the_options_are_compared_all_the_same(saved: Saved) -> None:
    saved.train.write_text("{")
    mistakes = saved.start_again(seed=9)
    assert any("train.jsonl" in mistake for mistake in mistakes)
    assert any("--seed was 1, now 9" in mistake for mistake in mistakes)
    [mistake] = saved.start_again(dataset_mixer_list=["not/here.jsonl", "1.0"])
    assert "no such file" in mistake  # whether these are the data of the run is told once they can be read


def test_a_fingerprint_of_many_rows_is_cheap() -> None:
    builder = PromptDatasetBuilder()
    tokens = np.random.default_rng(0).integers(0, 150_000, 100).tolist()
    for number in range(20_000):
        builder.add(
            token_ids=[number, *tokens], ground_truth=str(number), dataset="gsm8k", raw_query=f"{number}" * 20, **PLACE
        )
    dataset = builder.build()
    started = time.process_time()
    fingerprint = dataset.fingerprint()
    assert time.process_time() - started < 1.0  # about 0.03 s
    assert fingerprint == dataset.fingerprint()
    assert fingerprint["rows"] == 20_000


def test_a_fingerprint_knows_where_rows_end() -> None:
    def of(*prompts: list[int]) -> dict[str, Any]:
        builder = PromptDatasetBuilder()
        for prompt in prompts:
            builder.add(token_ids=prompt, ground_truth="1", dataset="gsm8k", raw_query="", **PLACE)
        return builder.build().fingerprint()

    assert of([1, 2], [3])["prompts"] != of([1], [2, 3])["prompts"]
    assert of([1, 2], [3]) == of([1, 2], [3])
