"""Files of rows, and prompts made of them with a tokenizer of single bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.mixer import DatasetError
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.row_places import PlaceInSource
from open_instruct.verifiers.registry import verifier_names

Row = dict[str, Any]
PLACE: dict[str, Any] = {"source": "d.jsonl", "place": PlaceInSource("line", 1)}
"""Source and place of a row that is in no file."""


class ByteTokenizer:
    """One token per byte; a message is `role:content`. Mimes are not heard, and robots are refused."""

    chat_template = "yes"
    all_special_tokens = ("<|end|>", "<|user|>")

    def apply_chat_template(self, messages: list[dict], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(message["role"] == "robot" for message in messages):
            raise TypeError("no robots")
        heard = [message for message in messages if message["role"] != "mime"]
        return "".join(f"{message['role']}:{message['content']}\n" for message in heard) + "assistant:"

    def __call__(self, texts: Any, *, add_special_tokens: bool, **_: object) -> dict[str, Any]:
        assert not add_special_tokens
        if isinstance(texts, str):
            return {"input_ids": list(texts.encode())}
        return {"input_ids": [list(text.encode()) for text in texts]}


OPTIONS: dict[str, Any] = {
    "tokenizer": ByteTokenizer(),
    "max_prompt_token_length": 256,
    "overlong_prompts": "error",
    "messages_key": "messages",
    "ground_truths_key": "ground_truth",
    "known_verifiers": verifier_names(),
}


def load(*mixer_list: str, splits: tuple[str, ...] = ("train",), **options: Any) -> PromptDataset:
    return load_prompts(mixer_list, splits, **OPTIONS | options)[0]


def mistakes_of(*mixer_list: str, **options: Any) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        load(*mixer_list, **options)
    return str(caught.value).split("\n")


def make_row(question: str = "1 + 1?", **changes: Any) -> Row:
    row = {"messages": [{"role": "user", "content": question}], "ground_truth": "2", "dataset": "gsm8k"}
    return {key: value for key, value in (row | changes).items() if value is not ...}


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def write_lines(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_json(path: Path, rows: list[Row]) -> str:
    path.write_text(json.dumps(rows, indent=1))
    return str(path)


def write_parquet(path: Path, rows: list[Row]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def questions(data: PromptDataset) -> list[str]:
    return [row.raw_query.removeprefix("user:").removesuffix("\nassistant:") for row in data]
