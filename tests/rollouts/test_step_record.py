"""What `--save_traces` writes names the row in the user's file, in each of the three forms."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import TINY_MODEL, make_args
from dataset_files import load, make_row, write_lines
from group_fakes import make_group, samples_of

from open_instruct.rollouts.step_record import StepTraces, write_step_record


def test_every_record_names_line_and_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    name = write_lines(tmp_path / "train.jsonl", [make_row(f"{number} + 1?") for number in range(4)])
    held_out = load(write_lines(tmp_path / "test.jsonl", [make_row("0 + 1?"), make_row("2 + 1?")]), "1.0")
    dataset = load(name, "1.0", exclude=held_out)  # lines 2 and 4 are left
    group = make_group([1.0, 0.0], index=1, spans=((0, 2),))
    assembly: Any = SimpleNamespace(training_step=3, trained=[(group, samples_of(group))])
    args = make_args(output_dir=str(tmp_path / "out"))
    write_step_record(args, assembly, dataset, tokenizer, 0)
    traces = StepTraces(args, dataset, tokenizer)
    traces.write_trained(assembly)
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
