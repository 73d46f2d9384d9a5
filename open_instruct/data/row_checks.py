"""Checks one row of a source, and reads chat messages, ground truth and verifier from it."""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from open_instruct.chat_codec import LITERAL, ChatCodec
from open_instruct.data.reward_columns import reward_columns
from open_instruct.data.row_places import PlaceInSource
from open_instruct.data.sample_record import NON_TENSOR_BATCH, has_proto_columns, prompt_fields
from open_instruct.data.sources import Columns, RawRow
from open_instruct.scored_groups import PASSTHROUGH
from open_instruct.verifiers.labels import number_as_text
from open_instruct.verifiers.reasoning_gym_data import check_verifier_name
from open_instruct.verifiers.registry import check_label as check_label_of_verifier
from open_instruct.verifiers.registry import verifier_name, verifier_weight
from open_instruct.verifiers.row_verifiers import SEPARATOR, checks_of_row, names_of_verifiers
from open_instruct.workflows.base import OwnPrompt, Workflow

DATASET_KEY = "dataset"
"""The column that names the verifier."""
PROMPT_KEY = "prompt"
"""TRL's name for the column that holds messages, or a text to which no chat template is applied."""
OwnPromptMaker = Callable[[Sequence[dict[str, str]], ChatCodec], OwnPrompt]
"""The signature of `Workflow.own_prompt`."""
ENVIRONMENT_KEY = "environment"
"""TRL's name for the column that names a row's environment."""
CONFIG_KEY, TOOLS_KEY = "env_config", "tools"
FACTS_KEYS = (CONFIG_KEY, ENVIRONMENT_KEY, TOOLS_KEY)
"""Columns that a workflow may read in addition to prompt and ground truth."""
MESSAGE_KEYS = ("role", "content")
GROUND_TRUTH = "the ground truth"
"""What messages call it, whatever its column is called."""
EMPTY = (None, "", [], {})
"""Values of a column that count as absent."""


@dataclass(frozen=True)
class RowReader:
    """The parts of row reading that a run's workflow does itself."""

    own_prompt: OwnPromptMaker | None = None
    """`Workflow.own_prompt`, if the workflow makes its own prompts. None: the chat template makes them."""
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """`Workflow.row_facts`, if the workflow reads other columns of a row. None: it reads none."""
    schemas: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None
    """`Workflow.row_schemas`."""

    @classmethod
    def of(cls, workflow: Workflow) -> "RowReader":
        own_prompt = workflow.own_prompt if workflow.has_own_prompts else None
        return cls(own_prompt, workflow.row_facts, workflow.row_schemas) if workflow.reads_rows else cls(own_prompt)


@dataclass(frozen=True)
class RowRules:
    """The rules that a row must follow, and how the row becomes a prompt."""

    messages_key: str
    ground_truths_key: str
    system_prompt_override: str | None
    known_verifiers: Collection[str]
    check_label: Callable[[str, object], None] | None
    max_prompt_token_length: int
    overlong_prompts: Literal["drop", "error"]
    held_out: frozenset[bytes]
    special_tokens: tuple[str, ...] = ()
    """Texts that the tokenizer would turn into control tokens."""
    remap: Mapping[str, str] = field(default_factory=dict)
    """Other names of verifiers, in lower case, and the names that replace them (`--remap_verifier`)."""
    reader: RowReader = RowReader()
    default_verifier: str | None = None
    """Verifier of rows without a column `dataset`."""
    keeps_columns: bool = False
    """Whether reward functions get the columns of rows."""
    datasets: dict[str, str] = field(default_factory=dict)
    """Checked values of the column `dataset`, each with the verifier's name that it became."""

    @property
    def columns(self) -> Columns | None:
        """The columns of messages, ground truth and verifier; None for all columns."""
        if self.keeps_columns:
            return None
        verifier = (DATASET_KEY, "") if self.default_verifier else (DATASET_KEY,)
        truth = (self.ground_truths_key, "") if _needs_no_label(self.default_verifier) else (self.ground_truths_key,)
        facts = [(key, "") for key in (FACTS_KEYS if self.reader.facts else (CONFIG_KEY, TOOLS_KEY))]
        return (self.messages_key, PROMPT_KEY), truth, verifier, *facts


@dataclass(slots=True)  # not frozen: that takes four times as long, and there may be millions
class CheckedRow:
    """A row that can be trained on unless its prompt is too long."""

    place: PlaceInSource
    messages: list[dict[str, Any]]
    ground_truth: object
    dataset: str
    number: int = 0
    """Number of the row among the rows that are read, from 0. `place` counts all rows of the source."""
    rendered: str | None = None
    """The prompt's finished text, with the chat template applied. If the row has this text, it has no messages."""
    facts: dict[str, Any] | None = None
    """What the workflow has read from the row; None: it reads nothing."""
    schemas: tuple[dict[str, Any], ...] = ()
    """The tools that the chat template describes in the prompt."""
    columns: dict[str, Any] | None = None
    """What reward functions get."""
    names_unused_tools: bool = False
    """Whether the column `tools` names tools although the workflow does not read this column."""


class RowError(ValueError):
    """Something is wrong with a row. The message does not name the row's place."""


def check_row(row: RawRow, rules: RowRules) -> CheckedRow:
    """The messages, ground truth and verifier of a row, and its columns if reward functions get them.

    A row has the columns `messages_key` (a list of `{"role", "content"}`; a last message by the assistant is a demonstration and
    is left out), `ground_truths_key` (any JSON value) and `dataset` (a verifier's name; or a list of names, with a list of as
    many ground truths). Or the row is in the document's sample format (`sample_record.py`), or in TRL's format: `prompt` holds
    messages, or a text to which no chat template is applied.

    Raises:
        RowError: the row has a mistake. The message names the first mistake; all missing columns count as one.
    """
    if row.problem:
        raise RowError(row.problem)
    is_proto = DATASET_KEY not in row.values and has_proto_columns(row.values)
    checked = _check_proto_row(row, rules) if is_proto else _check_row(row, rules)
    if rules.keeps_columns:
        prompt = checked.messages if checked.rendered is None else checked.rendered
        checked.columns = reward_columns(row.values, prompt)
    return checked


def _check_row(row: RawRow, rules: RowRules) -> CheckedRow:
    messages_key = (
        PROMPT_KEY if rules.messages_key not in row.values and PROMPT_KEY in row.values else rules.messages_key
    )
    verifier = _value(row.values, DATASET_KEY) or rules.default_verifier
    ground_truth = _value(row.values, rules.ground_truths_key)
    needed = (
        (rules.ground_truths_key, ground_truth not in EMPTY or _needs_no_label(verifier)),
        (DATASET_KEY, verifier not in EMPTY),
        (messages_key, messages_key in row.values),
    )
    if missing := [column for column, is_there in needed if not is_there]:
        raise RowError(_missing(missing, row, rules))
    if ground_truth in EMPTY:
        ground_truth = ""
    dataset = _check_dataset(verifier, rules)
    ground_truth = _without_decimals(ground_truth, dataset)
    prompt = row.values[messages_key]
    if messages_key == PROMPT_KEY and isinstance(prompt, str):
        _check_ground_truths(dataset, ground_truth, rules)
        return _with_finished_text(row, prompt, ground_truth, dataset, rules, PROMPT_KEY)
    return _with_messages(row, row.values, prompt, ground_truth, dataset, rules)


def _value(columns: Mapping[str, Any], key: str) -> Any:
    """The value of a column; None for NaN, which is how pandas writes a missing value."""
    value = columns.get(key)
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_messages(
    row: RawRow, columns: Mapping[str, Any], messages: object, ground_truth: object, dataset: str, rules: RowRules
) -> CheckedRow:
    """A row whose prompt is made from messages. The workflow may read the row's other `columns`."""
    checked = _check_messages(messages)
    _check_ground_truths(dataset, ground_truth, rules)
    checked = _prompt_messages(checked, rules.system_prompt_override)
    if rules.reader.facts is None:
        if _names_environment(_value(columns, CONFIG_KEY)):
            raise RowError(
                f"{CONFIG_KEY!r} names an environment, and only conversations have any: use --rollout_workflow conversation"
            )
        return CheckedRow(
            row.place, checked, ground_truth, dataset, names_unused_tools=_value(columns, TOOLS_KEY) not in EMPTY
        )
    facts, schemas = _facts(columns, checked, rules.reader)
    return CheckedRow(row.place, checked, ground_truth, dataset, facts=facts, schemas=schemas)


def _names_environment(config: object) -> bool:
    """Whether a row's `env_config`, in any of its forms, names an environment. In a columnar file all rows have the same keys,
    and the values of some rows are empty."""
    if isinstance(config, Mapping):
        entries = (config.get("env_configs") or []) if "env_configs" in config else [config]
        return not isinstance(entries, list) or any(
            not isinstance(entry, Mapping) or any(value is not None for value in entry.values()) for entry in entries
        )
    return config not in EMPTY


def _facts(
    columns: Mapping[str, Any], messages: list[dict[str, Any]], reader: RowReader
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """What the workflow reads from a row's columns, and the tools that the prompt describes."""
    assert reader.facts is not None
    read = {key: _value(columns, key) for key in FACTS_KEYS}
    for key, value in (*read.items(), ("messages", messages)):
        _as_json(value, f"{key!r}")
    if read[ENVIRONMENT_KEY] and not read[CONFIG_KEY]:
        read[CONFIG_KEY] = {"env_name": read[ENVIRONMENT_KEY]}
    elif not _names_environment(read[CONFIG_KEY]) and "env_configs" not in (read[CONFIG_KEY] or ()):
        read[CONFIG_KEY] = None
    try:
        facts = reader.facts(read)
        schemas = reader.schemas(facts) if reader.schemas else ()
    except ValueError as err:
        raise RowError(str(err)) from err
    return {**facts, "messages": messages}, tuple(schemas)


def _with_finished_text(
    row: RawRow, text: str, ground_truth: object, dataset: str, rules: RowRules, column: str
) -> CheckedRow:
    """A row whose prompt is a text, to which no chat template is applied."""
    if rules.reader.facts is not None:
        raise RowError(
            f"has its prompt in {column!r} as finished text, and a conversation needs messages: give a list of {{role, content}}"
        )
    if rules.system_prompt_override is not None:
        raise RowError(
            "has its prompt only as finished text, into which a system prompt cannot be put: leave out "
            "--system_prompt_override_file, or give rows with messages"
        )
    if not text:
        raise RowError(f"{column!r} is empty")
    _check_text(text, f"'{column}'")
    return CheckedRow(row.place, [], ground_truth, dataset, rendered=text.replace(LITERAL, ""))


def _check_proto_row(row: RawRow, rules: RowRules) -> CheckedRow:
    """`check_row` for a row in the document's sample format."""
    try:
        fields = prompt_fields(row.values)
    except ValueError as err:
        raise RowError(str(err)) from err
    dataset = _check_dataset(_without_publisher(fields.data_source, rules), rules, column="data_source")
    ground_truth = _without_decimals(fields.ground_truth, dataset)
    if fields.rendered_prompt is None:
        columns = row.values.get(NON_TENSOR_BATCH, row.values)
        assert isinstance(columns, Mapping)
        return _with_messages(row, columns, fields.messages, ground_truth, dataset, rules)
    _check_ground_truths(dataset, ground_truth, rules)
    return _with_finished_text(row, fields.rendered_prompt, ground_truth, dataset, rules, "full_prompts")


def _without_publisher(data_source: object, rules: RowRules) -> object:
    """`openai/gsm8k` becomes `gsm8k`, a verifier's name; `reasoning_gym/chain_sum`, and what is remapped, stay as they are."""
    if isinstance(data_source, str) and data_source.lower() in rules.remap:
        return data_source
    if not isinstance(data_source, str) or verifier_name(data_source, rules.known_verifiers) is not None:
        return data_source
    last = data_source.rpartition("/")[2]
    return last if verifier_name(last, rules.known_verifiers) is not None else data_source


def _check_ground_truths(dataset: str, ground_truth: object, rules: RowRules) -> None:
    """Check the ground truth of each verifier of a row. A row with several verifiers needs a list of as many ground truths."""
    names = names_of_verifiers(dataset)
    if len(names) > 1:
        if not isinstance(ground_truth, list) or len(ground_truth) != len(names):
            raise RowError(
                f"{len(names)} verifiers need a list of {len(names)} ground truths, got {ground_truth!r:.80}"
            )
        weightless = [name for name in names if not verifier_weight(name) > 0]
        if weightless:
            raise RowError(f"the weight of {weightless[0]!r} is not above 0, as it must be beside other verifiers")
    for name, truth in checks_of_row(dataset, ground_truth):
        check_ground_truth(name, truth, rules.check_label)


def check_ground_truth(
    dataset: str, ground_truth: object, check_label: Callable[[str, object], None] | None = check_label_of_verifier
) -> None:
    """Check that the verifier named in the `dataset` column exists and can use the ground truth.

    Raises:
        RowError: the verifier does not exist or cannot use the ground truth.
    """
    _check_text(ground_truth if isinstance(ground_truth, str) else _as_json(ground_truth, GROUND_TRUTH), GROUND_TRUTH)
    if check_label is None:
        return
    try:
        check_verifier_name(dataset)
        check_label(dataset, ground_truth)
    except ValueError as err:
        raise RowError(str(err)) from err
    except Exception as err:  # a verifier may raise anything for a broken row
        raise RowError(f"the verifier cannot use the ground truth ({type(err).__name__}: {err})") from err


def _as_json(value: object, subject: str) -> str:
    """A value of a row as JSON, which is how a run keeps it. Raises `RowError` if JSON has no such value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as err:
        raise RowError(
            f"{subject} is no value of JSON ({err}): write dates, bytes and the like as text, and null for NaN, got {value!r:.80}"
        ) from err


def _without_decimals(value: Any, dataset: str) -> Any:
    """A ground truth with `Decimal`, as parquet has it, replaced by a number of JSON; by a text if no such number has all its
    digits. `passthrough` promises to hand on the value as it is, so its ground truth stays, and is then no value of JSON."""
    if isinstance(value, list):
        return [_without_decimals(part, dataset) for part in value]
    if isinstance(value, dict):
        return {key: _without_decimals(part, dataset) for key, part in value.items()}
    if not isinstance(value, Decimal) or not value.is_finite() or _needs_no_label(dataset):
        return value
    digits = number_as_text(value)
    if "." not in digits:
        return int(digits)
    return float(digits) if number_as_text(float(digits)) == digits else digits


def _missing(columns: Sequence[str], row: RawRow, rules: RowRules) -> str:
    """The mistake that the row lacks all `columns`, or that they are empty, and what to do."""
    cures = {
        rules.messages_key: f"--sft_messages_key names the column; a text is read from a column {PROMPT_KEY!r} too",
        rules.ground_truths_key: "--ground_truths_key names the column",
        DATASET_KEY: "--default_verifier names the verifier of such rows",
    }
    parts = [f"{column!r} is empty ({cures[column]})" for column in columns if column in row.values]
    absent = [f"no {column!r} ({cures[column]})" for column in columns if column not in row.values]
    if absent:
        parts.append(f"{', '.join(absent)}; it has: {', '.join(row.values) or 'nothing'}")
    return ", ".join(parts)


def _needs_no_label(verifier: object) -> bool:
    """Whether rewards come only from the workflow, so that a row needs no ground truth."""
    return isinstance(verifier, str) and verifier.lower() == PASSTHROUGH


def _check_dataset(value: object, rules: RowRules, *, column: str = DATASET_KEY) -> str:
    if isinstance(value, str) and value in rules.datasets:
        return rules.datasets[value]
    values = value if isinstance(value, list) else names_of_verifiers(value) if isinstance(value, str) else []
    if not values or not all(isinstance(name, str) for name in values):
        raise RowError(f"'{column}' must be the name of a verifier, or a list of names, got {value!r:.80}")
    checked = SEPARATOR.join(_check_verifier(name, rules, column) for name in values)
    if isinstance(value, str):
        rules.datasets[value] = checked
    return checked


def _check_verifier(value: str, rules: RowRules, column: str) -> str:
    """The verifier's name, after `--remap_verifier`."""
    _check_text(value, f"'{column}'")
    name = rules.remap.get(value.lower(), value)
    if verifier_name(name, rules.known_verifiers) is None:
        names = sorted(rules.known_verifiers)
        near = difflib.get_close_matches(name.lower()[:100], names, n=1)  # 100: the time is quadratic
        hint = f"nearest: {near[0]}" if near else f"there are: {', '.join(names)}"
        if name != value:
            raise RowError(
                f"unknown verifier {name!r:.80}, which --remap_verifier puts in place of {value!r:.80}; {hint}"
            )
        cures = f"--remap_verifier '{value:.80}'=NAME has it scored by NAME; --verifier_modules adds one of yours"
        raise RowError(f"unknown verifier {value!r:.80} in '{column}'; {hint} ({cures})")
    return name


def _check_messages(value: object) -> list[dict[str, Any]]:
    """Messages with role, content and other fields that a chat template may read, such as `tool_calls` or OLMo's `functions`."""
    if not isinstance(value, list):
        cure = f"; a text is read from a column {PROMPT_KEY!r}" if isinstance(value, str) else ""
        raise RowError(f"messages must be a list of {{role, content}}, got {type(value).__name__}{cure}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"a message must be an object with role and content, got {message!r:.80}")
        further = {key: entry for key, entry in message.items() if key not in MESSAGE_KEYS and entry is not None}
        content = message.get("content")
        if content is None and further:
            content = ""  # a message may consist only of calls
        if not isinstance(content, str):
            raise RowError(f"a message's content must be text, got {type(content).__name__}")
        _check_text(content, "a message's content")
        _check_text(message["role"], "a message's role")
        if further:
            _check_text(json.dumps(further, ensure_ascii=False, default=str), "a message")
        messages.append({"role": message["role"], "content": content, **further})
    return messages


def _check_text(text: str, subject: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as err:  # half a surrogate pair: JSON can contain it, and no tokenizer accepts it
        raise RowError(f"{subject} is not valid text: {err}") from err


def _prompt_messages(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages without a demonstration at the end. If `system_prompt` is given, it is their system message."""
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(message["role"] != "system" for message in messages):
        raise RowError("empty messages: there is no user message before the assistant's")
    if system_prompt is None:
        return messages
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest]
