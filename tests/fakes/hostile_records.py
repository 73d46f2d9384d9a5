"""A run whose model, tools, data and names attack the page that shows them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from made_records import ids, make_record

from open_instruct.record.schema import PARQUET_OPTIONS, SAMPLES, TOKEN_COLUMNS

ATTACKS = (
    "<script>window.attacked = 1</script>",
    "<img src=x onerror='window.attacked = 1'>",
    "</script><script>window.attacked = 1</script>",
    "--><svg onload=window.attacked=1>",
    '"><a href="javascript:window.attacked=1">here</a>',
    "admin\u202eexe.txt\u2066 hidden\u200b",
)
STEP = 2


def make_hostile(directory: Path) -> Path:
    """Write the run. Every response of step 2, its ground truth, row, source and verdicts are attacks."""
    make_record(directory, num_steps=2, is_resumed=False)
    for path in [
        directory / "record" / "steps" / f"{STEP:06d}.parquet",
        *(directory / "record" / "evaluations").iterdir(),
    ]:
        rows = [attack(row, at) for at, row in enumerate(pq.read_table(path).to_pylist())]
        pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), path, **PARQUET_OPTIONS)
    options = json.loads((directory / "options.json").read_text())
    options["in_force"] |= {"run_name": "".join(ATTACKS), "model_name_or_path": ATTACKS[0], "seed": ATTACKS[1]}
    options["command"] = ATTACKS[2]
    (directory / "options.json").write_text(json.dumps(options))
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) | {f"eval/{ATTACKS[1].replace('/', '')}/scores": 1.0} for line in lines]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    with open(directory / "record" / "events.jsonl", "a") as file:
        for text in ATTACKS:
            event = {"kind": "warning", "level": text, "text": text, "unix": 1.8e9, "monotonic": 0.0, "start": 1}
            file.write(json.dumps(event) + "\n")
    return directory


def attack(row: dict[str, Any], at: int) -> dict[str, Any]:
    """The row with an attack in every text."""
    text = ATTACKS[at % len(ATTACKS)]
    length = len(row["response_ids"])
    response = ids(f"{text} {at}").tolist()
    lists = {name: (row[name] * (len(response) // length + 1))[: len(response)] for name in TOKEN_COLUMNS if row[name]}
    verdicts = [verdict | {"name": text, "read": text, "reasoning": text} for verdict in row["verdicts"] or ()]
    texts = {"ground_truth": text, "row": text, "source": text, "finish_reason": text}
    return {**row, **lists, **texts, "response_ids": response, "verdicts": verdicts}
