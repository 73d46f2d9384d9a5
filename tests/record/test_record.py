"""The record holds what a run sampled, scored and trained on: what is written is read again, also after a kill."""

import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import ray
from conftest import make_args
from group_fakes import make_group, make_spanned_group, samples_of
from recorded_groups import PAGE, WRITTEN_S, entry

from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.record import open_log, schema
from open_instruct.record import writer as writer_module
from open_instruct.record.groups import groups_of
from open_instruct.record.journal import Journal, WarningEvents
from open_instruct.record.places import RECORD
from open_instruct.record.reader import NoRecord, RunRecord
from open_instruct.record.samples import rows_of
from open_instruct.record.schema import SAMPLES, USES
from open_instruct.record.writer import RecordWriter
from open_instruct.rollouts.packing import prepare_collated_data_for_workers
from open_instruct.rollouts.rollout_record import RolloutRecord
from open_instruct.scored_groups import FunctionRewards, Reading


def batches_of(samples: Sequence[TrainingSample], *, shared: bool = False, **options: Any) -> list[list[MiniBatch]]:
    settings: dict[str, Any] = {
        "dp_world_size": 2,
        "pack_length": 16,
        "rows": 1,
        "layout": "packed",
        "num_mini_batches": 2,
    }
    pairs = 100.0 if shared else None
    return prepare_collated_data_for_workers(samples, pad_token_id=0, pairs_per_token=pairs, **{**settings, **options})


def values_of(rank_batches: list[list[MiniBatch]]) -> list[dict[str, np.ndarray | None]]:
    """What learners say whose log-prob of a token is its id / -1000, and whose weight is its id + 0.5."""
    values: list[dict[str, np.ndarray | None]] = []
    for mini_batches in rank_batches:
        micros = [micro for mini in mini_batches for micro in mini.micro_batches]
        ids = [micro.query_responses[:, 1:][micro.response_masks[:, 1:]] for micro in micros]
        flat = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.float32)
        values.append({"logprobs": flat / -1000, "correction": flat + 0.5})
    return values


def written(writer: RecordWriter) -> None:
    assert writer.flush(WRITTEN_S)
    assert writer.failure == ""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("shared", [False, True])
def test_every_token_gets_the_values_that_its_learner_computed(output: Path, layout: str, shared: bool) -> None:
    groups = [make_group([1.0, 0.0, 1.0], prompt_id=f"train-{i}", lengths=[3, 1 + i, 5]) for i in range(4)]
    samples = samples_of(*groups)
    rank_batches = batches_of(samples, layout=layout, shared=shared)
    writer = RecordWriter(output / RECORD, 0)
    for group in groups:
        writer.add(1, entry(group))
    writer.sent(1, rank_batches, samples)
    writer.commit(1, values_of(rank_batches))
    writer.close(WRITTEN_S)
    rows = RunRecord(output).samples(1).to_pylist()
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (f"train-{i}", j) for i in range(4) for j in range(3)
    ]
    for row in rows:
        ids = np.array(row["response_ids"])
        np.testing.assert_allclose(row["learner_logprobs"], ids / -1000, atol=1e-7)
        np.testing.assert_allclose(row["correction"], ids + 0.5)
        assert row["use"] == [schema.TRAINED] * len(ids)
    in_groups = [row["advantage"] for row in rows]
    assert in_groups == [sample.advantage for sample in samples]
    places = {(row["rank"], row["mini_batch"], row["micro_batch"], row["position"]) for row in rows}
    assert len(places) == len(rows)
    for row in rows:
        micro = rank_batches[row["rank"]][row["mini_batch"]].micro_batches[row["micro_batch"]]
        assert " ".join(map(str, row["response_ids"])) in " ".join(map(str, micro.query_responses.ravel()))


def test_partial_batches_of_a_step_are_one_step(output: Path) -> None:
    groups = [make_group([1.0, 0.0], prompt_id=f"train-{i}", lengths=[3, 4]) for i in range(4)]
    parts = [samples_of(*groups[:2]), samples_of(*groups[2:])]
    sent = [batches_of(part, num_mini_batches=1) for part in parts]
    writer = RecordWriter(output / RECORD, 0)
    for group in groups:
        writer.add(1, entry(group))
    for rank_batches, part in zip(sent, parts, strict=True):
        writer.sent(1, rank_batches, part)
    values = [values_of(rank_batches) for rank_batches in sent]

    def both() -> list[dict[str, Any]]:
        return [
            {name: np.concatenate([own[name] for own in of_rank]) for name in of_rank[0]}  # type: ignore[misc]
            for of_rank in zip(*values, strict=True)
        ]

    writer.commit(1, both())
    writer.close(WRITTEN_S)
    for row in RunRecord(output).samples(1).to_pylist():
        np.testing.assert_allclose(row["learner_logprobs"], np.array(row["response_ids"]) / -1000, atol=1e-7)


def test_groups_that_no_step_trains_on_are_there_with_their_tokens(output: Path) -> None:
    trained, solved = make_group([1.0, 0.0]), make_group([1.0, 1.0], prompt_id="train-1")
    samples = samples_of(trained)
    rank_batches = batches_of(samples)
    writer = RecordWriter(output / RECORD, 0)
    writer.add(1, entry(solved, "zero_std"))
    writer.add(1, entry(trained))
    writer.sent(1, rank_batches, samples)
    written(writer)
    before = {(row["prompt_id"], row["outcome"], *row["use"]) for row in RunRecord(output).samples(1).to_pylist()}
    assert before == {("train-0", "consumed", schema.OPEN, schema.OPEN), ("train-1", "zero_std", 6, 6)}
    assert (RunRecord(output).steps(), RunRecord(output).open_steps()) == ([], [1])
    writer.commit(1, values_of(rank_batches))
    writer.close(WRITTEN_S)
    record = RunRecord(output)
    after = {row["prompt_id"]: row for row in record.samples(1).to_pylist()}
    assert (record.steps(), record.open_steps()) == ([1], [])
    assert after["train-1"]["outcome"] == "zero_std"
    assert after["train-1"]["response_ids"] == [10, 11]
    assert after["train-1"]["learner_logprobs"] is None
    assert after["train-1"]["advantage"] is None
    assert after["train-0"]["use"] == [schema.TRAINED] * 2


def test_each_token_says_why_it_is_not_trained_on() -> None:
    group = make_spanned_group([[(1, 2), (3, 2)], [(3, 4)], [(3, 4)], [(3, 4)]])
    first, second, third, fourth = group.samples
    given = replace(second, loss_mask=np.array([True, False, False, True]))
    weightless = replace(third, weight=0.0)
    cut = replace(fourth, finish_reason="length")
    group = replace(group, result=replace(group.result, samples=[first, given, weightless, cut]))
    [one, two, *rest] = samples_of(group, mask=True)
    assert rest == []
    one = replace(one, mask=np.array([False, False, True, True]))
    two = replace(two, inserted=np.array([False, False, True, False]))
    tokens = {id(sample.response): schema_tokens(sample) for sample in (one, two)}
    uses = rows_of([entry(group, masks_cut_off=True)], tokens).to_pydict()["use"]
    assert uses == [
        [schema.TOO_OLD, schema.TOO_OLD, schema.TRAINED, schema.TRAINED],
        [schema.TRAINED, schema.GIVEN, schema.TAUGHT, schema.TRAINED],
        [schema.NO_WEIGHT] * 4,
        [schema.CUT] * 4,
    ]


def test_a_sample_that_is_not_trained_on_says_why() -> None:
    """In a group that a step takes: too old as a whole, cut off, and in a part of the group whose responses scored alike."""
    group = make_spanned_group([[(1, 2)], [(3, 2)], [(3, 2)]])
    cut = replace(group.samples[1], finish_reason="length")
    group = replace(group, result=replace(group.result, samples=[group.samples[0], cut, group.samples[2]]))
    uses = rows_of([entry(group, masks_cut_off=True, oldest_trained_version=2)], {}).to_pydict()["use"]
    assert uses == [[schema.TOO_OLD] * 2, [schema.CUT] * 2, [schema.ALIKE] * 2]
    uses = rows_of([entry(group, oldest_trained_version=2)], {}).to_pydict()["use"]
    assert uses == [[schema.TOO_OLD] * 2, [schema.ALIKE] * 2, [schema.ALIKE] * 2]


def schema_tokens(sample: TrainingSample) -> Any:
    from open_instruct.record.samples import TrainedTokens

    return TrainedTokens(sample, rank=0, mini_batch=0, micro_batch=0, position=0)


def test_versions_and_verdicts_of_a_row() -> None:
    group = make_spanned_group([[(1, 2), (3, 1)], [(3, 2)]], dataset="gsm8k")
    readings = ((Reading("41", "no"), Reading("42", None)),)
    rows = rows_of([entry(replace(group, readings=readings), step=4, attempt=2)], start=3).to_pylist()
    assert [row["version"] for row in rows] == [[1, 1, 3], [3, 3]]
    assert [[verdict["read"] for verdict in row["verdicts"]] for row in rows] == [["41"], ["42"]]
    assert [row["verdicts"][0]["score"] for row in rows] == [0.0, 1.0]
    assert {(row["step"], row["attempt"], row["start"], row["ground_truth"]) for row in rows} == {(4, 2, 3, '"42"')}
    assert [row["reward"] for row in rows] == [0.0, 10.0]


def test_a_log_torn_at_any_byte_gives_the_batches_before_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    batches = [rows_of([entry(make_group([1.0, 0.0], prompt_id=f"train-{i}"))]) for i in range(2)]
    with open(path, "ab", buffering=0) as file:
        ends = [open_log.append(file, batch) for batch in batches]
    whole = path.read_bytes()
    assert [batch.to_pydict() for batch in open_log.read(path)] == [batch.to_pydict() for batch in batches]
    for length in [*range(0, len(whole), 97), ends[0] - 1, ends[0], ends[0] + 1, len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert len(list(open_log.read(path))) == int(length >= ends[0])
    path.write_bytes(whole[: ends[0] + 40] + b"?" + whole[ends[0] + 41 :])
    assert len(list(open_log.read(path))) == 1


def test_a_resumed_run_sets_undone_steps_aside(output: Path) -> None:
    root = output / RECORD
    first = RecordWriter(root, 0)
    for step in (1, 2):
        first.add(step, entry(make_group([1.0, 1.0], prompt_id=f"train-{step}"), "zero_std", step))
        first.commit(step)
    first.add(3, entry(make_group([0.0, 0.0], prompt_id="train-3"), "zero_std", 3))
    written(first)  # and killed
    journal = Journal(root)
    journal.start()
    journal.start()
    second = RecordWriter(root, 1)
    second.carry_over(3, "train-3")  # the state of the checkpoint knows it without its tokens
    second.commit(2)
    second.commit(3)
    second.close(WRITTEN_S)
    record = RunRecord(output)
    assert record.steps() == [1, 2, 3]
    assert record.samples(2).num_rows == 0
    assert [row["response_ids"] for row in record.samples(3).to_pylist()] == [[0, 1], [10, 11]]
    assert {row["prompt_id"] for row in record.samples(3).to_pylist()} == {"train-3"}
    assert (root / "undone" / "2" / "steps" / "000002.parquet").exists()
    assert record.open_steps() == []


def test_only_the_newest_steps_are_kept_if_asked_for(output: Path) -> None:
    writer = RecordWriter(output / RECORD, 0, keep_steps=2)
    for step in range(1, 6):
        writer.commit(step)
    writer.close(WRITTEN_S)
    assert RunRecord(output).steps() == [4, 5]


def test_a_disk_that_refuses_ends_the_record_and_not_the_run(
    output: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "steps/000001.parquet")

    monkeypatch.setattr(writer_module, "_write_table", full)
    writer = RecordWriter(output / RECORD, 0)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            writer.add(step, entry(make_group([1.0, 0.0]), step=step))
            writer.commit(step)
        writer.close(WRITTEN_S)
    assert "No space left" in writer.failure
    began = time.monotonic()
    assert writer.flush(WRITTEN_S)  # a checkpoint does not wait for a record that has ended
    assert time.monotonic() - began < WRITTEN_S / 10
    assert [record.message for record in caplog.records] == [
        "the record ends here and the run goes on without it: No space left on device (steps/000001.parquet)"
    ]


def test_exports_that_fail_end_and_the_record_goes_on(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk:
        num_calls = 0

        def logged(self, training_step: int, table: pa.Table) -> None:
            self.num_calls += 1
            raise OSError(28, "No space left on device", "transcripts/step_000001.txt")

        committed = logged

    exports = FullDisk()
    writer = RecordWriter(output / RECORD, 0, exports=exports)
    for step in (1, 2):
        writer.add(step, entry(make_group([1.0, 0.0]), step=step))
        writer.commit(step)
    writer.close(WRITTEN_S)
    assert (exports.num_calls, writer.failure) == (1, "")
    assert RunRecord(output).steps() == [1, 2]
    assert caplog.text.count("nothing is exported from the record any more, and the run goes on: No space left") == 1


def test_a_learner_that_cannot_be_asked_costs_only_its_values(
    output: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise ray.exceptions.OwnerDiedError("object", None, "")

    monkeypatch.setattr(ray, "get", gone)
    requests: Any = None
    record = RolloutRecord(make_args(output_dir=str(output), record=True), requests)
    record.start(0)
    record.commit(1, cast("Any", [object()]))
    record.close()
    assert RunRecord(output).samples(1).num_rows == 0
    assert "lacks the learners' log-probs" in caplog.text


def test_a_slow_disk_costs_whole_steps_and_never_the_run(
    output: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = threading.Event()
    group = make_group([1.0, 0.0], lengths=[8, 8])
    monkeypatch.setattr(writer_module, "MOST_WAITING_BYTES", 3 * 16 * writer_module.BYTES_PER_TOKEN)
    begin = RecordWriter._begin
    monkeypatch.setattr(RecordWriter, "_begin", lambda self, step: (moves.wait(WRITTEN_S), begin(self, step)))
    writer = RecordWriter(output / RECORD, 0)
    for step in (1, 2):
        for number in range(2):
            named = replace(group, result=replace(group.result, prompt_id=f"train-{2 * step + number}"))
            writer.add(step, entry(named, "zero_std", step))
    writer.add(2, entry(group, "zero_std", 2))
    writer.commit(2)
    moves.set()
    written(writer)
    for step in (1, 3):
        writer.add(step, entry(group, "zero_std", step))
        writer.commit(step)
    writer.close(WRITTEN_S)
    assert RunRecord(output).steps() == [1, 3]  # of step 2 the second group was too much
    assert RunRecord(output).open_steps() == []
    assert caplog.text.count("is too slow, so steps are left out") == 1


def test_steps_and_evaluations_behind_a_checkpoint_are_undone_and_give_their_rows_back(output: Path) -> None:
    root = output / RECORD
    first = RecordWriter(root, 0)
    for step in (1, 2):
        first.add(step, entry(make_group([1.0, 1.0], prompt_id=f"train-{step}"), "zero_std", step))
        first.commit(step)
        first.measured(step, "default", [entry(make_group([1.0]), "measured", step, set="default")])
    written(first)  # and killed; its checkpoint is that of step 1
    first.close(WRITTEN_S)
    second = RecordWriter(root, 1)
    second.carry_over(2, "train-2")  # step 2 was trained, so that only its file has the tokens
    second.commit(2)
    second.commit(2)  # a second time changes nothing
    second.close(WRITTEN_S)
    record = RunRecord(output)
    assert [row["prompt_id"] for row in record.samples(2).to_pylist()] == ["train-2", "train-2"]
    assert [(file.version, file.set) for file in record.evaluations()] == [(1, "default")]
    assert (root / "undone" / "1" / "evaluations" / "000002_default.parquet").exists()


def test_a_step_that_was_trained_but_has_only_its_log_gets_its_file(output: Path) -> None:
    first = RecordWriter(output / RECORD, 0)
    first.add(1, entry(make_group([1.0, 1.0]), "zero_std"))
    written(first)  # the checkpoint of step 1 is there, and the run is killed
    second = RecordWriter(output / RECORD, 1)
    written(second)
    record = RunRecord(output)
    assert (record.steps(), record.open_steps()) == ([1], [])
    assert record.samples(1).num_rows == 2


def test_learners_that_gave_too_much_or_too_little_are_not_believed(
    output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group([1.0, 0.0], lengths=[3, 2])
    samples = samples_of(group)
    rank_batches = batches_of(samples, dp_world_size=1)
    writer = RecordWriter(output / RECORD, 0)
    for step, number in enumerate((4, 6, 5), start=1):
        writer.add(step, entry(group, step=step))
        writer.sent(step, rank_batches, samples)
        writer.commit(step, [{"logprobs": np.zeros(number, np.float32), "correction": None}])
    writer.close(WRITTEN_S)
    known = [RunRecord(output).samples(step)["learner_logprobs"].null_count == 0 for step in (1, 2, 3)]
    assert known == [False, False, True]
    assert caplog.text.count("their number is wrong") == 2


def test_secrets_are_masked(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    journal = Journal(output / RECORD)
    journal.start(command=f"--key {'a' * 40}")
    journal.event("warning", text="http://user:pa55word@host/ refused")
    writer = RecordWriter(output / RECORD, 0)
    writer.note({"kind": "given_up", "prompt_id": "train-0", "cause": f"key {'a' * 40} refused"})
    readings = ((Reading("1", f"asked with {'a' * 40}"), Reading("1")),)
    writer.add(1, entry(replace(make_group([1.0, 0.0]), readings=readings), "zero_std"))
    writer.commit(1)
    writer.close(WRITTEN_S)
    record = RunRecord(output)
    texts = json.dumps([record.starts(), record.events(), [*record.prompt_events()], record.samples(1).to_pylist()])
    assert "a" * 40 not in texts
    assert "pa55word" not in texts
    assert texts.count("***") >= 4


def test_a_torn_line_swallows_no_other(output: Path) -> None:
    journal = Journal(output / RECORD)
    journal.start(command="a")
    with open(output / RECORD / "starts.jsonl", "ab") as file:
        file.write(b'{"kind": "start", "torn')
    again = Journal(output / RECORD)
    again.start(command="b")
    assert [start["command"] for start in RunRecord(output).starts()] == ["a", "b"]


def test_starts_ends_and_events_of_a_run(output: Path) -> None:
    root = output / RECORD
    root.mkdir(parents=True)
    killed, ended = Journal(root), Journal(root)
    killed.start(command="a")
    killed.event("loop", after_step=0)
    ended.start(command="b")
    with ended.span("sync", version=3):
        pass
    with WarningEvents(ended):
        logging.getLogger("open_instruct.engines").warning("engine %d died", 1)
    ended.end("done", 0)
    ended.end("failed", 1)  # the first end counts
    with open(root / "events.jsonl", "ab") as file:
        file.write(b'{"kind": "torn')
    record = RunRecord(output)
    assert [(start["number"], start["command"], (start["end"] or {}).get("reason")) for start in record.starts()] == [
        (1, "a", None),
        (2, "b", "done"),
    ]
    assert [event["kind"] for event in record.events()] == ["loop", "sync", "warning"]
    assert record.events()[1]["version"] == 3
    assert record.events()[1]["seconds"] >= 0
    assert record.events()[2]["text"] == "engine 1 died"


def test_what_happened_to_prompts_is_there_in_order(output: Path) -> None:
    writer = RecordWriter(output / RECORD, 0)
    writer.note({"kind": "issued", "prompt_id": "train-0", "attempt": 0, "version": 2})
    writer.note({"kind": "lost", "prompt_id": "train-0"})
    written(writer)
    assert list(RunRecord(output).prompt_events()) == [
        {"start": 1, "kind": "issued", "prompt_id": "train-0", "attempt": 0, "version": 2},
        {"start": 1, "kind": "lost", "prompt_id": "train-0"},
    ]
    writer.close(WRITTEN_S)


def test_what_cannot_be_read_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoRecord, match="holds no record"):
        RunRecord(tmp_path)
    writer = RecordWriter(tmp_path / RECORD, 0)
    written(writer)
    writer.close(WRITTEN_S)
    with pytest.raises(KeyError, match="no step 7"):
        RunRecord(tmp_path).samples(7)
    (tmp_path / RECORD / "record.json").write_text('{"version": 2}')
    with pytest.raises(NoRecord, match="of version 2, this program reads 1"):
        RunRecord(tmp_path)


def test_the_page_names_every_column_and_every_use() -> None:
    text = PAGE.read_text()
    row, uses = text.split("## A row")[1].split("## Uses of a token")
    assert re.findall(r"^\| `(\w+)` \|", row, re.MULTILINE) == SAMPLES.names
    table = dict(re.findall(r"^\| (\d) \| (.*) \|$", uses, re.MULTILINE))
    assert {int(code): meaning.replace("`", "") for code, meaning in table.items()} == {
        code: meaning.replace("`", "") for code, meaning in USES.items()
    }
    assert sorted(USES) == list(range(10))


def test_groups_are_the_same_when_they_are_read_again(output: Path) -> None:
    group = make_spanned_group([[(1, 2), (3, 2)], [(3, 4)], [(3, 1)]], dataset="gsm8k", prompt_id="train-5", index=3)
    given = replace(group.samples[1], loss_mask=np.array([True, False, False, True]), kind="reasoning", number=2)
    group = replace(group, result=replace(group.result, samples=[group.samples[0], given, group.samples[2]]))
    functions = (FunctionRewards("short", 0.5, np.array([1.0, np.nan, -2.0]), 0.25, extra={"why": ["a", "b", "c"]}),)
    group = replace(group, readings=((Reading("41", "no"), Reading("42"), Reading("")),), functions=functions)
    samples = samples_of(group)
    writer = RecordWriter(output / RECORD, 0)
    writer.add(1, entry(group))
    writer.sent(1, batches_of(samples), samples)
    writer.commit(1)
    writer.close(WRITTEN_S)
    (read,) = groups_of(RunRecord(output).samples(1))
    assert read.group.readings == group.readings
    for again, before in zip(read.group.samples, group.samples, strict=True):
        assert vars_of(again) == vars_of(before)
    assert (read.group.by_verifier[0].scores == group.scores).all()
    np.testing.assert_array_equal(read.group.functions[0].rewards, functions[0].rewards)
    assert read.group.functions[0].extra == functions[0].extra
    assert [sample.advantage for sample in read.trained or []] == [sample.advantage for sample in samples]
    assert [sample.mask.tolist() for sample in read.trained or []] == [sample.mask.tolist() for sample in samples]


def vars_of(sample: Any) -> tuple[Any, ...]:
    values = vars(sample) | {"loss_mask": None if sample.loss_mask is None else sample.loss_mask.tolist()}
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in values.values())
