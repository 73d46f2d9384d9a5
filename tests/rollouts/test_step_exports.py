"""What is exported of a step names the row in the user's file, in each of the three forms."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import TINY_MODEL, make_args
from dataset_files import load, make_row, write_lines
from group_fakes import make_group, samples_of

from open_instruct.record.samples import RecordedGroup, TrainedTokens, rows_of
from open_instruct.rollouts.step_exports import StepExports
from open_instruct.scored_groups import CONSUMED


@pytest.mark.parametrize("has_dataset", [True, False])
def test_every_record_names_line_and_file(tmp_path: Path, has_dataset: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    name = write_lines(tmp_path / "train.jsonl", [make_row(f"{number} + 1?") for number in range(4)])
    held_out = load(write_lines(tmp_path / "test.jsonl", [make_row("0 + 1?"), make_row("2 + 1?")]), "1.0")
    dataset = load(name, "1.0", exclude=held_out)  # lines 2 and 4 are left
    group = replace(make_group([1.0, 0.0], index=1, spans=((0, 2),)), dataset="gsm8k")
    tokens = samples_of(group)
    args = make_args(output_dir=str(tmp_path / "out"))
    entry = RecordedGroup(
        group, group.rewards(1.0), dataset[1].place, name, dataset[1].ground_truth, CONSUMED, 0, 3, 0.0
    )
    trained = {
        id(sample.response_ids): TrainedTokens(own, 0, 0, 0, position)
        for position, (sample, own) in enumerate(zip(group.samples, tokens, strict=True))
    }
    table = pa.table(rows_of([entry], trained))
    StepExports(args, dataset if has_dataset else None, tokenizer).committed(3, table)
    (samples,) = (tmp_path / "out" / "samples").iterdir()
    (rollouts,) = (tmp_path / "out" / "rollouts").glob("*_rollouts_*.jsonl")
    (transcripts,) = (tmp_path / "out" / "transcripts").iterdir()
    of_samples = [json.loads(line)["non_tensor_batch"] for line in samples.read_text().splitlines()]
    assert {(fields["row"], fields["index"], fields["extra_info"]["index"]) for fields in of_samples} == {
        (f"{name} line 4", 1, 1)
    }
    of_rollouts = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert {(row["row"], row["prompt_idx"]) for row in of_rollouts} == {(f"{name} line 4", 0)}
    assert transcripts.read_text().count(f"{name} line 4 (gsm8k)") == 2
