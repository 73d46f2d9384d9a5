"""The columns of a row as reward functions get them."""

import json
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from open_instruct.data.prompt_dataset import PromptRow
from open_instruct.rewards.functions import PROMPT, RewardCall
from open_instruct.verifiers.labels import number_as_text


def reward_columns(values: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """The columns of a row as JSON values, and as `prompt` the text or the messages that the model is given.

    Decimals become numbers, dates texts, and NaN, which is how pandas writes a missing number, None. Columns with other values
    that JSON does not have, such as images and infinity, are left out.
    """
    return {**json_values(values), PROMPT: prompt}


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON has, or has in another form."""
    columns = {}
    for name, value in values.items():
        try:
            columns[name] = json.loads(json.dumps(value, default=_as_json), parse_constant=_none_for_nan)
        except (TypeError, ValueError, RecursionError):
            continue
    return columns


def call_for(
    row: PromptRow,
    column_names: Iterable[str],
    *,
    texts: list[str],
    token_ids: list[list[int]],
    state: Mapping[str, Any],
) -> RewardCall:
    """What a reward function gets for the responses to a row.

    Args:
        column_names: the columns that any row of the run has. One that this row lacks is None.
        state: fields of `TrainerState`.
    """
    columns = dict.fromkeys(column_names) | (row.columns or {})
    return RewardCall(columns.get(PROMPT) or row.raw_query, texts, token_ids, columns, state)


def _none_for_nan(constant: str) -> None:
    """None for `NaN`. Raises `ValueError` for infinity, which JSON does not have either."""
    if constant != "NaN":
        raise ValueError(constant)


def _as_json(value: object) -> Any:
    """A value that JSON does not have, as one that it has. Raises `TypeError` if there is none."""
    if isinstance(value, Decimal) and value.is_finite():
        digits = number_as_text(value)
        return float(digits) if "." in digits else int(digits)
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(type(value).__name__)
