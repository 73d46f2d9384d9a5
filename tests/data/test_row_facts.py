"""Rows of conversations: their tools and environments, checked before a run, and described in the prompt."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TINY_MODEL
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.load_report import LoadReport
from open_instruct.data.mixer import DatasetError
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.row_checks import RowReader
from open_instruct.workflows.conversations.options import ConversationOptions, own_schemas
from open_instruct.workflows.conversations.workflow import Conversations

SHOWS_TOOLS = (
    "{% if tools %}TOOLS {% for t in tools %}{{ t['function']['name'] }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
)


def load_and_report(
    path: Path, rows: list[dict[str, Any]], *, conversations: bool = True, suffix: str = ".jsonl", **options: Any
) -> tuple[PromptDataset, LoadReport]:
    file = path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    chosen = ConversationOptions(**options)
    chosen.tool_schemas = own_schemas(chosen)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = SHOWS_TOOLS
    return load_prompts(
        [str(file), "1.0"],
        ["train"],
        tokenizer=tokenizer,
        max_prompt_token_length=200,
        overlong_prompts="error",
        messages_key="messages",
        ground_truths_key="ground_truth",
        known_verifiers={"passthrough", "math"},
        reader=RowReader.of(Conversations(chosen)) if conversations else None,
    )


def load(path: Path, rows: list[dict[str, Any]], **options: Any) -> PromptDataset:
    return load_and_report(path, rows, **options)[0]


def row(**columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "4", "dataset": "math", **columns}


BOTH = {"tools": ["calculator", "python"]}


def test_a_prompt_describes_the_tools_of_its_row(tmp_path: Path) -> None:
    rows = [row(), row(tools=["python"]), row(tools=[]), row(env_config={"env_name": "counter", "target": 3})]
    data = load(tmp_path, rows, **BOTH)
    shown = [one.raw_query.partition("<|user|>")[0] for one in data]
    assert shown == [
        "TOOLS calculator python ",
        "TOOLS python ",
        "",
        "TOOLS calculator python increment decrement submit ",
    ]
    assert data[3].facts == {
        "environments": [{"env_name": "counter", "target": 3}],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    hidden = load(tmp_path, rows, pass_tools_to_chat_template=False, **BOTH)
    assert {one.raw_query for one in hidden} == {"<|user|>Hi<|assistant|>"}


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ([{"env_name": "counter"}], {"environments": [{"env_name": "counter"}]}),
        (
            {"env_configs": [{"env_name": "counter", "target": None}], "max_steps": 9},
            {"environments": [{"env_name": "counter"}], "max_steps": 9},
        ),
        ({"env_name": "wordle", "word": "crane", "is_text_env": True, "max_steps": 3}, None),
        ({"env_configs": []}, {}),
        (None, {}),
    ],
)
def test_env_config_has_the_forms_of_open_instruct(tmp_path: Path, config: Any, read: dict[str, Any] | None) -> None:
    [one] = load(tmp_path, [row(env_config=config)])
    assert one.facts is not None
    facts = {key: value for key, value in one.facts.items() if key != "messages"}
    if read is None:
        read = {"environments": [{"env_name": "wordle", "word": "crane", "is_text_env": True}], "max_steps": 3}
    assert facts == read


def test_trls_column_names_an_environment(tmp_path: Path) -> None:
    [one] = load(tmp_path, [row(environment="counter")])
    assert one.facts is not None
    assert one.facts["environments"] == [{"env_name": "counter"}]


VERL = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "Hi"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_verl_have_conversations_too(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [{**VERL, "tools": ["python"]}, {**VERL, "tools": None}]
    data = load(tmp_path, rows, suffix=suffix, **BOTH)
    assert [one.raw_query.partition("<|user|>")[0] for one in data] == ["TOOLS python ", "TOOLS calculator python "]
    messages = [{"role": "user", "content": "Hi"}]
    assert [one.facts for one in data] == [{"tools": ["python"], "messages": messages}, {"messages": messages}]


def test_a_conversation_needs_messages(tmp_path: Path) -> None:
    finished = {"data_source": "math", "reward_model": VERL["reward_model"], "full_prompts": "Hi"}
    for one in ({"prompt": "Hi", "ground_truth": "4", "dataset": "math"}, finished):
        with pytest.raises(DatasetError, match="as finished text, and a conversation needs messages"):
            load(tmp_path, [one])


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"tools": ["search"]}, "'tools' names 'search', and --tools gives: calculator, python"),
        ({"tools": "search"}, "'tools' must be a list of names, got 'search'"),
        ({"env_config": 3}, "'env_config' must be an object or a list of objects, got 3"),
        ({"env_config": {"name": "counter"}}, "an environment in 'env_config' needs an 'env_name'"),
        (
            {"env_config": {"env_name": "openenv", "url": "ws://there"}},
            "the environment 'openenv' needs url: name it in --tools, and give it in --tool_configs",
        ),
        ({"env_config": {"env_name": "chess"}}, "there is no tool or environment called 'chess'; there are: "),
        ({"env_config": {"env_name": "chess"}}, "; --environment_modules takes files that register some"),
        ({"env_config": {"env_name": "counter", "max_steps": 0}}, "must be a whole number from 1, got 0"),
        ({"messages": "Hi", "prompt": "Hi"}, "messages must be a list"),
    ],
)
def test_wrong_rows_are_named_before_a_run(tmp_path: Path, columns: dict[str, Any], told: str) -> None:
    with pytest.raises(DatasetError) as error:
        load(tmp_path, [row(**columns)], **BOTH)
    assert "line 1: " in str(error.value)
    assert told in str(error.value)


def test_an_environment_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="only conversations have any: use --rollout_workflow conversation"):
        load(tmp_path, [row(env_config={"env_name": "counter"})], conversations=False)


@pytest.mark.parametrize(
    "config", [None, {}, [], {"env_configs": [], "max_steps": 4}, {"env_name": None, "target": None}]
)
def test_a_config_that_names_no_environment_is_for_any_workflow(tmp_path: Path, config: Any) -> None:
    assert len(load(tmp_path, [row(env_config=config)], conversations=False)) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tools_that_no_conversation_uses_are_told(tmp_path: Path, suffix: str) -> None:
    rows = [row(tools=None), row(tools=["python"]), row(tools=[])]
    data, report = load_and_report(tmp_path, rows, conversations=False, suffix=suffix)
    assert len(data) == 3
    [warning] = report.warnings()
    assert warning == (
        f"{tmp_path}/rows{suffix}: 1 of 3 rows name tools in a column 'tools' (the first: "
        f"{'line' if suffix == '.jsonl' else 'row'} 2), and this run has none: --tools names them"
    )
    assert load_and_report(tmp_path, rows, suffix=suffix, **BOTH)[1].warnings() == []


def test_a_template_without_a_place_for_answers_is_told(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)

    def told(template: str, **options: Any) -> list[str]:
        tokenizer.chat_template = template
        chosen = ConversationOptions(tools=["calculator"], **options)
        chosen.tool_schemas = own_schemas(chosen)
        return list(Conversations(chosen).template_mistakes(ChatCodec(tokenizer)))

    begin, end = "{% for m in messages %}{% if m['role'] ", "{% endif %}{{ m['content'] }}{% endfor %}"
    refuses = begin + "== 'tool' %}{{ raise_exception('no tools') }}" + end
    drops = "{% for m in messages %}{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}{% endfor %}"
    assert "no tools" in told(refuses, tool_parser_type="vllm_hermes")[0]
    assert "it leaves out what they say" in told(drops, tool_parser_type="vllm_hermes")[0]
    assert "--tool_parser_type legacy" in told(drops, tool_parser_type="vllm_hermes")[0]
    assert told(drops) == told(refuses) == []
    assert told(SHOWS_TOOLS, tool_parser_type="vllm_hermes") == []
