"""The record's table of samples: its columns, how they are stored, and what the codes in it mean.

One row is one sampled response, or one sample of a conversation of several samples. Arrays over the R tokens of the response are
lists of that length. `docs/reference/record.md` is the same for people; a test compares them.
"""

from collections.abc import Mapping

import pyarrow as pa

RECORD_VERSION = 1
"""Grows when a column changes its meaning. A reader refuses versions that it does not know, by name."""
VERSION_KEY = b"open_instruct.record"

# What a token is used for, and if for nothing, why.
TRAINED = 0
GIVEN = 1
TAUGHT = 2
TOO_OLD = 3
CUT = 4
NO_WEIGHT = 5
LEFT_OUT = 6
OPEN = 7
MEASURED = 8
ALIKE = 9
USES: Mapping[int, str] = {
    TRAINED: "trained on",
    GIVEN: "written by a tool, an environment or the chat template",
    TAUGHT: "written by the workflow; its cross-entropy is trained on (--ce_coef)",
    TOO_OLD: "sampled by weights older than the bound (--straggler_policy truncate)",
    CUT: "of a response that was cut off (--mask_truncated_completions)",
    NO_WEIGHT: "of a sample with weight 0",
    LEFT_OUT: "of a group or response that no step trains on; `outcome` says why",
    OPEN: "of a step that is not trained yet",
    MEASURED: "of an evaluation",
    ALIKE: "of a part of a group whose responses all scored alike",
}

VERDICT = pa.struct(
    [
        ("name", pa.string()),
        ("kind", pa.string()),  # `verifier` or `function`
        ("weight", pa.float64()),
        ("score", pa.float64()),  # null: not scored
        ("read", pa.string()),  # the answer that a verifier has read
        ("reasoning", pa.string()),
        ("seconds", pa.float64()),  # for the whole group; null if it was not timed alone
    ]
)

EFFECT = pa.struct(
    [
        ("kind", pa.string()),  # `generate`, or the tool
        ("name", pa.string()),
        ("began", pa.float64()),  # seconds from `began` of the group
        ("seconds", pa.float64()),
    ]
)

SAMPLES = pa.schema(
    [
        # Which response
        ("prompt_id", pa.string()),
        ("attempt", pa.int32()),
        ("sample", pa.int32()),
        ("start", pa.int32()),
        ("step", pa.int32()),
        ("set", pa.string()),
        ("row", pa.string()),
        ("index", pa.int32()),
        ("source", pa.string()),
        ("dataset", pa.string()),
        ("outcome", pa.string()),
        # What was sampled
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("version", pa.list_(pa.int32())),
        ("use", pa.list_(pa.uint8())),
        ("engine_logprobs", pa.list_(pa.float32())),
        ("learner_logprobs", pa.list_(pa.float32())),
        ("correction", pa.list_(pa.float32())),
        # What it was worth
        ("ground_truth", pa.string()),
        ("score", pa.float64()),
        ("reward", pa.float64()),
        ("environment_reward", pa.float64()),
        ("advantage", pa.float64()),
        ("verdicts", pa.list_(VERDICT)),
        # Its place in a conversation
        ("group", pa.int32()),
        ("kind", pa.string()),
        ("number", pa.int32()),
        ("weight", pa.float64()),
        ("is_judged", pa.bool_()),
        ("goes_on", pa.bool_()),
        ("parent", pa.int32()),
        ("answer_start", pa.int32()),
        # When and where
        ("engine", pa.int32()),
        ("issue_version", pa.int32()),
        ("kv_age", pa.int32()),
        ("began", pa.float64()),
        ("generation_s", pa.float64()),
        ("tool_s", pa.float64()),
        ("effects", pa.list_(EFFECT)),
        ("score_s", pa.float64()),
        ("arrived", pa.float64()),
        # Its place in the batch
        ("rank", pa.int32()),
        ("mini_batch", pa.int32()),
        ("micro_batch", pa.int32()),
        ("position", pa.int32()),
    ],
    metadata={VERSION_KEY: str(RECORD_VERSION).encode()},
)

TOKEN_COLUMNS = ("version", "use", "engine_logprobs", "learner_logprobs", "correction")
"""Lists of R values, beside `response_ids`. The last two may be null."""
_FLOATS = ("engine_logprobs", "learner_logprobs", "correction")
_IDS = ("prompt_ids", "response_ids")
PARQUET_OPTIONS = {
    "compression": "zstd",
    "compression_level": 3,
    # Repeated strings and runs of versions become almost nothing; numbers that never repeat are divided by bytes instead.
    "use_dictionary": [field.name for field in SAMPLES if pa.types.is_string(field.type)]
    + ["version.list.element", "use.list.element"],
    "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in (*_FLOATS, *_IDS)},
    "write_statistics": False,
}


def with_all_columns(table: pa.Table) -> pa.Table:
    """A table of this version with null in the columns that its writer did not know yet."""
    missing = [name for name in SAMPLES.names if name not in table.column_names]
    for name in missing:
        table = table.append_column(SAMPLES.field(name), pa.nulls(len(table), SAMPLES.field(name).type))
    return table.select(SAMPLES.names).cast(SAMPLES) if missing else table


def version_of(schema: pa.Schema) -> int:
    """The version of the record that a table is of. Raises `ValueError` if the table says none."""
    try:
        return int((schema.metadata or {})[VERSION_KEY])
    except (KeyError, ValueError):
        raise ValueError("the table does not say which version of the record it is of") from None
