"""Samples in the format of the fully async policy's document (verl's `DataProtoItem`): written as a run's record, read as data.

    batch             six int64 arrays: the prompt padded on the left, the response padded on the right, both joined
    non_tensor_batch  data_source, ability, reward_model {ground_truth, style}, extra_info {question, …}, uid, …
    meta_info         global_token_num: number of tokens of each sample in the batch to which the sample belongs

A row of data has all three parts or, as in verl's Parquet files, only the fields of `non_tensor_batch`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NON_TENSOR_BATCH = "non_tensor_batch"
COLUMNS = (NON_TENSOR_BATCH, "data_source", "reward_model", "extra_info", "prompt", "raw_prompt", "full_prompts")
"""Columns that are read; a file has some of them."""
RULE = "rule"
"""Style of a reward that a verifier gives. In some data the rule's name follows, as in `rule-lighteval/MATH_v2`."""


@dataclass(frozen=True)
class DataProtoItem:
    """One sample: its tokens, its fields that are not tensors, and facts about its batch."""

    batch: dict[str, np.ndarray]  # (Q,) prompts, (R,) responses and response_mask, the rest (Q + R,); all int64
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The sample as one line of JSON, which `from_json` reads."""
        arrays = {name: values.tolist() for name, values in self.batch.items()}
        return json.dumps({"batch": arrays, NON_TENSOR_BATCH: self.non_tensor_batch, "meta_info": self.meta_info})

    @classmethod
    def from_json(cls, line: str) -> "DataProtoItem":
        parts = json.loads(line)
        batch = {name: np.asarray(values, np.int64) for name, values in parts["batch"].items()}
        return cls(batch, parts[NON_TENSOR_BATCH], parts["meta_info"])


@dataclass(frozen=True)
class ItemShape:
    """The lengths to which samples are padded, and the token that fills them."""

    prompt_length: int
    response_length: int
    pad_token_id: int


def to_proto_item(
    query: np.ndarray,
    response: np.ndarray,
    shape: ItemShape,
    *,
    mask: np.ndarray | None = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    meta_info: Mapping[str, Any] | None = None,
) -> DataProtoItem:
    """A prompt's and a response's token ids in the document's layout.

    `mask` (R,) is False on response tokens that are not trained on; by default all are trained on. As in verl, positions count
    attended tokens from 0 and do not increase on padding.

    Raises:
        ValueError: the prompt or the response is longer than `shape` allows.
    """
    num_left, num_right = shape.prompt_length - len(query), shape.response_length - len(response)
    if num_left < 0 or num_right < 0:
        raise ValueError(
            f"a prompt of {len(query)} and a response of {len(response)} tokens do not fit in "
            f"{shape.prompt_length} + {shape.response_length}"
        )
    prompts = np.pad(np.asarray(query, np.int64), (num_left, 0), constant_values=shape.pad_token_id)
    responses = np.pad(np.asarray(response, np.int64), (0, num_right), constant_values=shape.pad_token_id)
    trained = np.ones(len(response), np.int64) if mask is None else np.asarray(mask, np.int64)
    attended = np.pad(np.ones(len(query) + len(response), np.int64), (num_left, num_right))
    batch = {
        "attention_mask": attended,
        "input_ids": np.concatenate([prompts, responses]),
        "position_ids": np.clip(np.cumsum(attended) - 1, 0, None),
        "prompts": prompts,
        "response_mask": np.pad(trained, (0, num_right)),
        "responses": responses,
    }
    return DataProtoItem(batch, dict(non_tensor_batch or {}), dict(meta_info or {}))


def non_tensor_fields(
    *, data_source: str, ground_truth: object, rendered_prompt: str, uid: str, index: int, row: str
) -> dict[str, Any]:
    """The fields of a sample that are not arrays.

    Args:
        rendered_prompt: the prompt's text with the chat template applied; verl calls it `full_prompts`.
        uid: the same for all responses of one group.
        index: number of the row among the rows that the run trains on, from 0.
        row: where the row stands in the user's data, such as `train.jsonl line 7`.
    """
    return {
        "data_source": data_source,
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
        "full_prompts": rendered_prompt,
        "uid": uid,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "index": index,
        "row": row,
    }


def append_record(path: Path, items: Iterable[DataProtoItem]) -> None:
    """Append samples to a file of JSON lines, which a mixer list may name as data."""
    with path.open("a") as file:
        file.writelines(item.to_json() + "\n" for item in items)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptFields:
    """The parts of a row from which a prompt is made."""

    data_source: object
    ground_truth: object
    messages: object = None
    """A list of `{"role", "content"}`; None if the row has only the finished text."""
    rendered_prompt: str | None = None


def has_proto_columns(columns: Collection[str]) -> bool:
    """Whether these are the columns of the document's format."""
    return NON_TENSOR_BATCH in columns or {"data_source", "reward_model"} <= set(columns)


def prompt_fields(row: Mapping[str, Any]) -> PromptFields:
    """The prompt of a row: its messages (`prompt` or `raw_prompt`), else its question as a user message, else its finished text.

    Raises:
        ValueError: a field is missing or cannot be used.
    """
    fields = row.get(NON_TENSOR_BATCH, row)
    if not isinstance(fields, Mapping):
        raise ValueError(f"'{NON_TENSOR_BATCH}' must be an object, got {fields!r:.80}")
    data_source = fields.get("data_source")
    if data_source in (None, ""):
        raise ValueError(f"no 'data_source'; it has: {', '.join(fields)}")
    ground_truth = _ground_truth(fields.get("reward_model"))
    for key in ("prompt", "raw_prompt"):
        if fields.get(key) is not None:
            return PromptFields(data_source, ground_truth, messages=fields[key])
    extra_info = fields.get("extra_info")
    question = extra_info.get("question") if isinstance(extra_info, Mapping) else None
    if question is not None:
        return PromptFields(data_source, ground_truth, messages=[{"role": "user", "content": question}])
    rendered = fields.get("full_prompts")
    if not isinstance(rendered, str) or not rendered:
        raise ValueError("no prompt: it has none of 'prompt', 'raw_prompt', 'extra_info.question' and 'full_prompts'")
    return PromptFields(data_source, ground_truth, rendered_prompt=rendered)


def _ground_truth(reward_model: object) -> object:
    if not isinstance(reward_model, Mapping):
        raise ValueError(f"'reward_model' must be {{ground_truth, style}}, got {reward_model!r:.80}")
    style = reward_model.get("style")
    if style is not None and str(style).partition("-")[0] != RULE:
        raise ValueError(f"'reward_model.style' {style!r:.80}: only 'rule' is supported, which means a verifier")
    if reward_model.get("ground_truth") in (None, "", []):
        raise ValueError("no 'reward_model.ground_truth'")
    return reward_model["ground_truth"]
