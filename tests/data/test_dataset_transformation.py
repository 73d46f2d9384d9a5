"""From rows to the prompts of a run: templates, filters, and what a large dataset costs."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from dataset_files import (
    OPTIONS,
    load,
    make_row,
    mistakes_of,
    questions,
    write_lines,
)

from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.row_checks import RowReader
from open_instruct.workflows.rc.options import ReasoningCacheOptions
from open_instruct.workflows.rc.workflow import ReasoningCache

# Reasoning cache


def as_rc(**options: Any) -> Any:
    """How the reasoning cache makes prompts."""
    templates = {
        "rc_reasoning_prompt_template": "Think: {problem}{curr_summary}",
        "rc_summarization_prompt_template": "Sum up: {problem}{existing_summary}{reasoning}",
    }
    return RowReader.of(ReasoningCache(ReasoningCacheOptions(**templates, **options)))


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


def test_a_problem_becomes_the_prompt_of_the_first_turn(tmp_path: Path, tiny_tokenizer: Any) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_row("1 + 1?")])
    (row,) = load(name, "1.0", tokenizer=tiny_tokenizer, reader=as_rc())
    assert tiny_tokenizer.decode(row.prompt) == "<|user|>Think: 1 + 1?<|assistant|>"
    assert row.raw_query == "1 + 1?"
    (opened,) = load(name, "1.0", tokenizer=tiny_tokenizer, reader=as_rc(rc_use_think_tags=True))
    assert tiny_tokenizer.decode(opened.prompt).endswith("<|assistant|><think>\n")


def test_a_problem_has_to_fit_into_both_templates(tmp_path: Path, tiny_tokenizer: Any) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_row("1 + 1?")])
    length = len(tiny_tokenizer.encode("<|user|>Sum up: 1 + 1?<|assistant|>"))
    options: dict[str, Any] = {"tokenizer": tiny_tokenizer, "reader": as_rc()}
    assert len(load(name, "1.0", **options, max_prompt_token_length=length)) == 1
    (mistake,) = mistakes_of(name, "1.0", **options, max_prompt_token_length=length - 1)
    assert f"the longest {length}" in mistake


def test_a_problem_is_one_message(tmp_path: Path, tiny_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    name = write_lines(tmp_path / "d.jsonl", [make_row(messages=messages), make_row()])
    assert mistakes_of(name, "1.0", tokenizer=tiny_tokenizer, reader=as_rc()) == [
        f"{name} line 1: the reasoning cache takes one user message, the problem"
    ]


# Filters


def test_overlong_prompts(tmp_path: Path) -> None:
    rows = [make_row("x" * length) for length in (5, 50, 90, 6)]
    name = write_lines(tmp_path / "d.jsonl", rows)
    around = len("user:\nassistant:")
    exact: dict[str, Any] = {"max_prompt_token_length": around + 50}
    data, report = load_prompts([name, "1.0"], ["train"], **OPTIONS | exact | {"overlong_prompts": "drop"})
    assert [len(question) for question in questions(data)] == [5, 50, 6]
    assert data.longest_prompt == around + 50
    assert (report.num_overlong, report.sources[0].num_overlong, report.sources[0].num_kept) == (1, 1, 3)
    assert mistakes_of(name, "1.0", max_prompt_token_length=around + 10) == [
        f"{name}: 2 of 4 prompts are longer than --max_prompt_token_length {around + 10}, the longest {around + 90} "
        "(line 3): raise the limit, or drop these prompts with --overlong_prompts drop"
    ]


def test_nothing_left(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_row(), make_row("2 + 2?")])
    (mistake,) = mistakes_of(name, "1.0", max_prompt_token_length=1, overlong_prompts="drop")
    assert mistake.startswith("--dataset_mixer_list: nothing is left of 2 rows (2 prompts too long, 0 held out)")
    (mistake,) = mistakes_of(name, "1.0", exclude=load(name, "1.0"))
    assert "nothing is left of 2 rows (0 prompts too long, 2 held out)" in mistake


def test_held_out_prompts_stay_out() -> None:
    """Seeds 7 and 8 of chain_sum give the same rows shifted by one."""
    held_out = load("reasoning_gym/chain_sum?size=20&seed=8", "1.0")
    data, report = load_prompts(
        ["reasoning_gym/chain_sum?size=20&seed=7", "1.0"], ["train"], **OPTIONS, exclude=held_out
    )
    assert (len(data), report.num_excluded) == (1, 19)
    assert not set(questions(data)) & set(questions(held_out))


def test_batches_do_not_show(tmp_path: Path) -> None:
    """2,500 rows are two and a half batches."""
    name = write_lines(tmp_path / "d.jsonl", [make_row(str(i), ground_truth=str(i)) for i in range(2500)])
    data = load(name, "1.0")
    assert questions(data) == [row.ground_truth for row in data] == [str(i) for i in range(2500)]


def test_tokens_are_those_of_the_chat_template(tmp_path: Path) -> None:
    """With a real tokenizer, also one that would put special tokens around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<user>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    raw.add_special_tokens(["<bos>", "<user>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>")
    tokenizer.chat_template = "<bos>{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    row = make_row("1 + é?")
    (loaded,) = load(write_lines(tmp_path / "d.jsonl", [row]), "1.0", tokenizer=tokenizer)
    expected = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
    assert loaded.prompt.tolist() == expected
    assert loaded.prompt.tolist().count(0) == 1


def test_importing_is_light() -> None:
    code = (
        "import sys; import open_instruct.data.dataset_transformation;"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym'"
        ") if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("amount", ["1.0", "1.5"])
def test_memory_grows_with_the_prompts_alone(tmp_path: Path, amount: str) -> None:
    """Five times as many batches need no more than their finished prompts do: no row stays as Python objects."""

    def beyond_the_prompts(num_rows: int) -> float:
        name = write_lines(tmp_path / f"{num_rows}.jsonl", [make_row(f"{number} + 1") for number in range(num_rows)])
        tracemalloc.start()
        data = load(name, amount)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - 1.2 * sum(
            array.nbytes for array in data.arrays().values()
        )  # a buffer that grows has room to spare

    few, many = beyond_the_prompts(4_000), beyond_the_prompts(20_000)
    assert (many - few) / 16_000 < 16  # bytes a row; a row as a dict has over 1,000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_rows_are_checked_in_two_minutes(tmp_path: Path) -> None:
    """On two cores that do nothing else: this thread's time, or half of all processor time. Other processes change neither."""
    from transformers import AutoTokenizer

    words = "state the final answer to this arithmetic problem : how many apples has john left after he gave some away"
    with open(tmp_path / "million.jsonl", "w") as file:
        for number in range(1_000_000):
            row = make_row(f"{words} {number} - {number // 2} =", ground_truth=str(number - number // 2))
            file.write(json.dumps(row) + "\n")
    started, started_here = time.process_time(), time.thread_time()
    data = load(
        str(tmp_path / "million.jsonl"),
        "1.0",
        tokenizer=AutoTokenizer.from_pretrained(TINY_MODEL),
        overlong_prompts="drop",
    )
    assert time.thread_time() - started_here < 120
    assert (time.process_time() - started) / 2 < 120
    assert len(data) == 1_000_000
    assert data[999_999].ground_truth == "500000"
