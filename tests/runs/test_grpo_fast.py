"""The command as a user runs it: a whole run, its end, its interruption, its resumption, and mistakes."""

import json
import os
import re
import resource
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MAX_MODEL_LEN, TIMEOUT_S, TINY_MODEL, make_args
from otlp_collector import Collector, attributes_of, grpc_collector
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from whole_runs import (
    EVALUATION,
    SUMS,
    Process,
    assert_each_prompt_once,
    command,
    prompts_by_step,
    rows,
    shared_memory,
)

from open_instruct import export
from open_instruct.record import schema
from open_instruct.record.reader import RunRecord
from open_instruct.report.metric_names import find
from open_instruct.rollouts.prompt_ledger import RUN_ENDED
from open_instruct.storage.checkpoints import files_in, sync_files_of_rank

NUM_STEPS = 8
OF_THREE = "reasoning_gym/chain_sum?min_terms=3&max_terms=3&min_digits=2&max_digits=2"
OPTIONS: dict[str, object] = {
    # One verifier scores both sets and both sources.
    "eval_sets": [f"two={EVALUATION[0]}", f"three={OF_THREE}&size=12&seed=20240", "three.interval=8", "two.samples=2"],
    "dataset_mixer_list": [f"{SUMS}&size=200&seed=7", "1.0", f"{OF_THREE}&size=100&seed=7", "1.0"],
    "num_learners_per_node": 2,
    "deepspeed_stage": 2,
    "total_episodes": 16 * NUM_STEPS,
}


@dataclass(frozen=True)
class FirstLeg:
    """A run until its SIGTERM."""

    code: int
    seconds: float
    """From the signal to the end."""
    summary: dict[str, Any]
    scraped: dict[str, float]
    """What `/metrics` answered meanwhile, by name."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with grpc_collector() as collector:
        yield collector


def scrape(log: Path) -> dict[str, float]:
    """A `GET` of the address that the run's log names."""
    addresses = re.findall(r"http://127\.0\.0\.1:\d+/metrics", log.read_text())
    with urllib.request.urlopen(addresses[-1], timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> tuple[FirstLeg, Path, str]:
    """A run with evaluation, two engines and two learners, which gets a SIGTERM, and goes on to its end with the same command."""
    output_dir = tmp_path_factory.mktemp("run") / "out"
    words = command(
        output_dir,
        **OPTIONS,
        local_eval_every=4,
        eval_on_step_0=True,
        vllm_num_engines=2,
        async_steps=2,
        save_freq=2,
        save_traces=True,
        report_to=["tensorboard"],
        metrics_port=0,
        otlp_traces_endpoint=collector.endpoint,
    )
    before = shared_memory()
    process = Process(words)
    # Early enough that the signal does not come during the evaluation of step 4, which would begin anew.
    process.wait_for_rows(output_dir / "prompts.jsonl", 2)
    scraped = scrape(output_dir / "logs" / "driver.log")
    os.killpg(process.popen.pid, signal.SIGTERM)
    started = time.monotonic()
    code, _ = process.wait(60)
    first = FirstLeg(code, time.monotonic() - started, json.loads((output_dir / "summary.json").read_text()), scraped)
    process.assert_nothing_is_left(before)
    process = Process(words)
    code, output = process.wait()
    assert code == 0, output
    process.assert_nothing_is_left(before)
    return first, output_dir, output


@pytest.fixture(scope="module")
def finished(legs: tuple[FirstLeg, Path, str]) -> tuple[Path, str]:
    return legs[1:]


def test_sigterm_writes_a_checkpoint_and_the_same_command_goes_on(legs: tuple[FirstLeg, Path, str]) -> None:
    first, output_dir, _ = legs
    assert first.code == 85
    assert first.seconds < 30
    assert 2 <= first.summary["training_steps"] < NUM_STEPS
    num_open = first.summary["prompts"]["dropped"][RUN_ENDED]
    summary = json.loads((output_dir / "summary.json").read_text())
    # What had arrived when the checkpoint was written is in it, and all else that was open is issued again.
    assert num_open > 0
    assert summary["prompts"]["reissued"] <= num_open
    assert_each_prompt_once(output_dir)


def test_a_run_ends_with_summary_table_and_plot(finished: tuple[Path, str]) -> None:
    output_dir, output = finished
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["training_steps"] == NUM_STEPS
    assert 0 <= summary["eval_accuracy_before"] <= 1
    assert 0 <= summary["eval_accuracy_after"] <= 1
    assert {*summary["eval_sets"]} == {"two", "three"}
    assert summary["wall_seconds"] > 0
    assert summary["tokens_per_second"] > 0
    prompts = summary["prompts"]
    assert prompts["issued"] == prompts["consumed"] + sum(prompts["dropped"].values()) >= 4 * NUM_STEPS
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "eval accuracy after" in output
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in output
    assert "Traceback" not in output


def test_metrics_have_a_row_per_step_that_adds_up(finished: tuple[Path, str]) -> None:
    table = rows(finished[0] / "metrics.jsonl")
    assert [row["training_step"] for row in table] == list(range(NUM_STEPS + 1))
    for metric, steps in {
        "eval/two/pass_at_1": [0, 4, 8],
        "eval/three/pass_at_1": [0, 8],
        "eval/pass_at_1": [0, 8],
    }.items():
        assert [row["training_step"] for row in table if metric in row] == steps
    for row in table[1:]:
        num_groups = [row[f"source/{name}/groups"] for name in ("chain_sum", "chain_sum_2")]
        assert sum(num_groups) == row["all_groups/total_prompts"]
        assert row["source/chain_sum/share"] + row["source/chain_sum_2/share"] == pytest.approx(1)
        scores = [row.get(f"source/{name}/scores", 0.0) for name in ("chain_sum", "chain_sum_2")]
        assert np.average(scores, weights=num_groups) == pytest.approx(row["all_groups/scores"])
        assert row["prompts/issued"] == row["prompts/consumed"] + row["prompts/open"] + row.get(
            "prompts/dropped_zero_std", 0
        )
        assert 0 <= row["num_steps_off_policy"] <= row["num_steps_off_policy_max"] <= 2
        assert row["val/num_total_tokens"] >= row["val/num_step_tokens"] > 0
    assert table[1]["debug/vllm_vs_local_logprob_diff_max"] < 1e-4  # the first batch is on-policy
    assert {key for row in table for key in row if find(key) is None} == set()


def test_metrics_answer_prometheus_while_the_run_goes_on(legs: tuple[FirstLeg, Path, str]) -> None:
    first, output_dir, _ = legs
    table = {row["training_step"]: row for row in rows(output_dir / "metrics.jsonl")}
    step = first.scraped["open_instruct_training_step"]
    assert step >= 1
    for name in ("scores", "all_groups/scores", "prompts/issued", "learner_tokens_per_second_step"):
        assert first.scraped["open_instruct_" + name.replace("/", "_")] == table[int(step)][name]


def test_tensorboard_has_the_numbers_of_both_legs_once(finished: tuple[Path, str]) -> None:
    events = EventAccumulator(str(finished[0] / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    assert isinstance(tags, list)
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    table = rows(finished[0] / "metrics.jsonl")
    names = {name for row in table for name, value in row.items() if isinstance(value, bool | int | float)}
    assert names <= points.keys()
    for name in names - {
        "training_step"
    }:  # which is TensorBoard's own step; an evaluation before training has no more of it
        expected = [(row["training_step"], row[name]) for row in table if isinstance(row.get(name), bool | int | float)]
        assert points[name] == [(step, pytest.approx(float(value), rel=1e-6)) for step, value in expected], name


def test_each_prompt_is_a_trace_that_ends_as_the_account_says(finished: tuple[Path, str], collector: Collector) -> None:
    roots = [attributes_of(span) for span in collector.named("prompt")]
    outcomes: dict[int, dict[str, str]] = {}
    for root in roots:
        if root["prompt.outcome"] != RUN_ENDED:
            outcomes.setdefault(root["prompt.step"], {})[root["prompt.id"]] = root["prompt.outcome"]
    assert outcomes == {step: dict(pairs) for step, pairs in _fates_by_step(finished[0]).items()}
    generations = [attributes_of(span) for span in collector.named("generation")]
    assert {generation["prompt.engine"] for generation in generations} == {0, 1}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in collector.spans)


def test_the_record_agrees_with_metrics_fates_and_evaluations(finished: tuple[Path, str]) -> None:
    record = RunRecord(finished[0])
    table = {row["training_step"]: row for row in rows(finished[0] / "metrics.jsonl")}
    fates = {step: dict(pairs) for step, pairs in _fates_by_step(finished[0]).items()}
    assert record.steps() == list(range(1, NUM_STEPS + 1))
    for step in record.steps():
        samples = record.samples(step).to_pylist()
        assert {row["prompt_id"]: row["outcome"] for row in samples} == fates[step]
        assert np.mean([row["reward"] for row in samples]) == pytest.approx(table[step]["all_groups/scores"])
        differences = [
            abs(learner - engine)
            for row in samples
            for use, learner, engine in zip(
                row["use"],
                row["learner_logprobs"] or row["engine_logprobs"],
                row["engine_logprobs"],
                strict=True,
            )
            if use == schema.TRAINED
        ]
        assert np.mean(differences) == pytest.approx(table[step]["debug/vllm_vs_local_logprob_diff_mean"], rel=1e-4)
        assert max(differences) == pytest.approx(table[step]["debug/vllm_vs_local_logprob_diff_max"], rel=1e-4)
        oldest = min(version for row in samples if row["outcome"] == "consumed" for version in row["version"])
        assert step - 1 - oldest == table[step]["num_steps_off_policy_max"]
    for file in record.evaluations():
        scores = record.evaluation(file.version, file.set, ["reward"])["reward"].to_pylist()
        assert np.mean(scores) == pytest.approx(table[file.version][f"eval/{file.set}/scores"])
    assert [(file.version, file.set) for file in record.evaluations()] == [
        (0, "three"), (0, "two"), (4, "two"), (8, "three"), (8, "two")
    ]  # fmt: skip
    first, second = record.starts()
    assert (first["end"]["reason"], first["end"]["exit_code"]) == ("interrupted", 85)
    assert (second["end"]["reason"], second["end"]["exit_code"]) == ("done", 0)
    assert [event["step"] for event in record.events() if event["kind"] == "step"] == record.steps()
    assert {"sync", "checkpoint", "model", "evaluation", "loop"} <= {event["kind"] for event in record.events()}
    starts = {step: {row["start"] for row in record.samples(step, ["start"]).to_pylist()} for step in record.steps()}
    assert (starts[1], starts[NUM_STEPS]) == ({1}, {2})


def test_the_record_holds_the_log_probs_of_the_weights_that_were_trained(finished: tuple[Path, str]) -> None:
    """Those of the model that was saved after the step before, computed by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    record, num_compared = RunRecord(finished[0]), 0
    for step in (3, 5, 7):
        model = AutoModelForCausalLM.from_pretrained(finished[0] / f"step_{step - 1:06d}", dtype=torch.float32)
        for row in record.samples(step).to_pylist():
            if row["learner_logprobs"] is None:
                continue
            prompt, response = row["prompt_ids"], row["response_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits.float(), -1)[range(len(response)), response].numpy()
            is_trained = np.array(row["use"]) == schema.TRAINED
            np.testing.assert_allclose(np.array(row["learner_logprobs"])[is_trained], expected[is_trained], atol=2e-4)
            num_compared += 1
    assert num_compared > 10


@pytest.mark.parametrize("form", ["transcripts", "rollouts", "samples", "completions"])
def test_exports_of_the_record_are_what_the_run_wrote_itself(
    finished: tuple[Path, str], tmp_path: Path, form: str
) -> None:
    assert export.main([str(finished[0]), "--form", form, "--to", str(tmp_path)]) == 0
    written, exported = (_entries(directory / form) for directory in (finished[0], tmp_path))
    assert written.keys() == exported.keys()
    assert len(written) >= 3
    for name in written:
        if name.endswith("_metadata.jsonl"):  # says when it was written
            continue
        assert exported[name] == written[name]


def _entries(directory: Path) -> dict[str, list[str]]:
    """What the files hold, in an order that does not depend on which group came first."""
    entries = {}
    for path in directory.iterdir():
        if path.suffix == ".txt":
            entries[path.name] = sorted(path.read_text().rstrip("\n").split("\n\n"))
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            places = {"sample_idx", "prompt_idx"}
            rest = [{key: value for key, value in line.items() if key not in places} for line in lines]
            entries[path.name] = sorted(json.dumps(line, sort_keys=True) for line in rest)
    return entries


def _fates_by_step(output_dir: Path) -> dict[int, list[tuple[str, str]]]:
    fates: dict[int, list[tuple[str, str]]] = {}
    for line in rows(output_dir / "prompts.jsonl"):
        fates.setdefault(line["training_step"], []).extend((row["prompt_id"], row["fate"]) for row in line["prompts"])
    return fates


def test_answers_of_each_evaluation_can_be_read(finished: tuple[Path, str]) -> None:
    for step in (0, 4, 8):
        (measured,) = [row for row in rows(finished[0] / "metrics.jsonl") if row["training_step"] == step]
        answers = rows(finished[0] / "completions" / f"step_{step:06d}.jsonl")
        assert {answer["set"] for answer in answers} == ({"two"} if step == 4 else {"two", "three"})
        for name in {answer["set"] for answer in answers}:
            scores = [answer["scores"] for answer in answers if answer["set"] == name]
            assert len(scores) == {"two": 2 * 24, "three": 12}[name]
            assert np.mean(scores) == pytest.approx(measured[f"eval/{name}/scores"])
        assert all(answer["prompt"] and answer["num_tokens"] > 0 for answer in answers)


def test_the_saved_model_is_loaded_by_transformers_and_vllm(finished: tuple[Path, str], ray_session: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from open_instruct.data_types import SamplingConfig
    from open_instruct.run import rollout_manager

    path = json.loads((finished[0] / "summary.json").read_text())["checkpoint"]
    assert (finished[0] / "step_000002" / "model.safetensors").is_file()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 34 ="}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    expected = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist()
    args = make_args(model_name_or_path=path)
    queues = rollout_manager.create_queues(args)
    [engine] = rollout_manager.create_rollout_engines(args, None, queues=queues, max_model_len=MAX_MODEL_LEN)
    config = SamplingConfig(temperature=0.0, max_tokens=8)
    prompt = ids[0].numpy().astype(np.int32)
    [result] = ray_session.get(engine.generate_with_single_engine.remote([prompt], config), timeout=TIMEOUT_S)
    ray_session.kill(engine)
    assert result.responses[0].tolist() == expected


def test_a_checkpoint_lists_the_files_of_every_learner(finished: tuple[Path, str]) -> None:
    path = finished[0] / "checkpoint_states" / "step_000008"
    state = json.loads((path / "run_state.json").read_text())
    assert state["files"] == {name: n for name, n in files_in(path).items() if name != "run_state.json"}
    by_rank = [set(sync_files_of_rank(path, rank)) for rank in (0, 1)]
    assert by_rank[0] | by_rank[1] | {"rollout_state.npz"} == state["files"].keys()
    assert {"random_state_1.pt", "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt"} == by_rank[1]


def test_the_same_command_again_says_that_it_is_complete(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from open_instruct import grpo_fast

    before = (finished[0] / "metrics.jsonl").read_bytes()
    words = command(finished[0], **OPTIONS)
    assert grpo_fast.main(words[2:]) == 0
    assert "complete" in capsys.readouterr().out
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_another_seed_in_the_same_directory_is_refused(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from open_instruct import grpo_fast

    words = command(finished[0], **OPTIONS, seed=4)
    with pytest.raises(SystemExit) as exit_info:
        grpo_fast.main(words[2:])
    assert exit_info.value.code == 2
    assert "--seed was 3, now 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "options"),
    [
        (
            "evaluation",
            {"dataset_mixer_eval_list": [f"{SUMS}&size=20000", "1.0"], "local_eval_every": 3, "async_steps": 1},
        ),
        ("step", {"num_epochs": 40, "async_steps": 1}),
        ("pieces", {"streaming": True, "deepspeed_stage": 2, "async_steps": 0}),
        ("any", {"colocate": True}),
        ("sync", {"weight_sync_timeout_s": 8.0, "vllm_num_engines": 2, "async_steps": 1}),
    ],
)
def test_sigterm_ends_every_phase_in_time(tmp_path: Path, phase: str, options: dict[str, Any]) -> None:
    """An evaluation of minutes, steps of seconds, pieces of a step, and a sync that waits for an engine that hangs."""
    out = tmp_path / "out"
    words = command(out, total_episodes=16 * 500, **options)
    process = Process(words)
    process.wait_for_rows(out / "prompts.jsonl", 4 if phase == "evaluation" else 2)
    if phase == "sync":
        [*_, (engine, _)] = [one for one in process.processes() if one[1].startswith("ray::LLMRayActor")]
        os.kill(engine, signal.SIGSTOP)
        time.sleep(3.0)
    os.killpg(process.popen.pid, signal.SIGTERM)
    started = time.monotonic()
    code, output = process.wait(120)
    assert code == 85, output
    assert time.monotonic() - started < 60
    summary = json.loads((out / "summary.json").read_text())
    step = summary["training_steps"]
    assert [row["training_step"] for row in rows(out / "metrics.jsonl") if "scores" in row] == list(range(1, step + 1))
    assert_each_prompt_once(out)
    assert (out / "checkpoint_states" / f"step_{step:06d}" / "run_state.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("async_steps", [0, 2])
def test_killed_runs_go_on_without_losing_or_repeating_a_prompt(tmp_path: Path, async_steps: int) -> None:
    options = {"total_episodes": 16 * 10, "async_steps": async_steps, "checkpoint_state_freq": 2}
    code, output = Process(command(tmp_path / "unbroken", **options)).wait()
    assert code == 0, output
    words = command(tmp_path / "killed", **options)
    for num_rows in (3, 6):
        process = Process(words)
        process.wait_for_rows(tmp_path / "killed" / "prompts.jsonl", num_rows)
        os.killpg(process.popen.pid, signal.SIGKILL)
        process.wait(30)
        deadline = time.monotonic() + 60
        while process.left_behind() and time.monotonic() < deadline:
            time.sleep(0.5)
    newest = max((tmp_path / "killed" / "checkpoint_states").glob("step_*"))
    os.truncate(newest / "rollout_state.npz", 100)  # as a power loss may leave it
    code, output = Process(words).wait()
    assert code == 0, output
    assert f"is passed over: {newest} (rollout_state.npz has 100 bytes instead of" in output
    assert_each_prompt_once(tmp_path / "killed")
    assert [row["training_step"] for row in rows(tmp_path / "killed" / "metrics.jsonl")] == list(range(1, 11))
    if async_steps == 0:
        assert prompts_by_step(tmp_path / "killed") == prompts_by_step(tmp_path / "unbroken")


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    before = shared_memory()
    process = Process(command(tmp_path / "out", total_episodes=16 * 500))
    process.wait_for_rows(tmp_path / "out" / "prompts.jsonl", 2)
    os.killpg(process.popen.pid, signal.SIGINT)
    code, output = process.wait(60)
    assert code == 130, output
    assert "Traceback" not in output
    process.assert_nothing_is_left(before)


@pytest.mark.slow
def test_two_learners_and_two_engines_learn(tmp_path: Path) -> None:
    words = command(
        tmp_path / "out",
        dataset_mixer_list=[f"{SUMS}&size=8000&seed=7", "1.0"],
        dataset_mixer_eval_list=[f"{SUMS}&size=256&seed=20240", "1.0"],
        eval_on_step_0=True,
        num_unique_prompts_rollout=32,
        num_samples_per_prompt_rollout=8,
        response_length=32,
        pack_length=2048,
        total_episodes=256 * 80,
        learning_rate=2e-4,
        vllm_num_engines=2,
        num_learners_per_node=2,
        deepspeed_stage=3,
    )
    code, output = Process(words).wait(600)
    assert code == 0, output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_accuracy_after"] > summary["eval_accuracy_before"] + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["LLMRayActor", "PolicyTrainerRayProcess", "RolloutController"])
def test_a_run_whose_actor_dies_ends_at_once_and_says_so(tmp_path: Path, actor: str) -> None:
    words = command(tmp_path / "out", total_episodes=16 * 500, max_engine_restarts=0)
    before = shared_memory()
    process = Process(words)
    process.wait_for_rows(tmp_path / "out" / "prompts.jsonl", 2)
    [victim] = [pid for pid, title in process.processes() if title.startswith(f"ray::{actor}")]
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    code, output = process.wait(90)
    assert time.monotonic() - started < 45  # of which shutting down the others is the most
    assert code == 1, output
    assert "ERROR" in output
    assert "Traceback" not in output
    named = {"LLMRayActor": "engine 0", "PolicyTrainerRayProcess": "learner 0", "RolloutController": "the controller"}
    assert named[actor] in output.splitlines()[-1], output
    process.assert_nothing_is_left(before)


NAN_AFTER_TWO_STEPS = """
import itertools
from open_instruct.algorithms.losses import LOSSES

calls = itertools.count()

@LOSSES.register("breaks")
def breaks(inputs, options):
    return -inputs.advantages * inputs.new_logprobs * (1.0 if next(calls) < 2 else float("nan")), {}
"""


@pytest.mark.slow
def test_gradients_that_stay_not_finite_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "my_loss.py").write_text(NAN_AFTER_TWO_STEPS)
    own = {"algorithm_modules": tmp_path / "my_loss.py", "loss_fn": "breaks", "max_nonfinite_steps": 3}
    words = command(tmp_path / "out", total_episodes=16 * 20, save_freq=1, pack_length=2048, **own)
    code, output = Process(words).wait()
    assert code == 1, output
    assert "the gradient was not finite in 3 training steps in a row, the last of them step 5" in output
    assert (tmp_path / "out" / "checkpoint_states" / "step_000005" / "run_state.json").is_file()
    weights = [load_file(tmp_path / "out" / f"step_00000{step}" / "model.safetensors") for step in (1, 2, 4)]
    assert all(value.isfinite().all() and value.equal(weights[2][name]) for name, value in weights[1].items())
    assert not all(value.equal(weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_a_lock_that_a_killed_build_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator that DeepSpeed compiles on CPU: whoever finds the lock waits for ever."""
    build = tmp_path / "extensions" / "deepspeed_shm_comm"
    build.mkdir(parents=True)
    (build / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(build.parent))
    code, output = Process(command(tmp_path / "out", total_episodes=16, init_timeout_s=90.0)).wait(150)
    assert code == 0, output


# --- mistakes ---------------------------------------------------------------------------------------------------------


def write_rows(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


GOOD_ROW = {"messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2", "dataset": "gsm8k"}


def bad_inputs(tmp_path: Path) -> dict[str, tuple[dict[str, object], list[str]]]:
    """Options and what the message must say."""
    good = json.dumps(GOOD_ROW)
    no_template = tmp_path / "no_template"
    no_template.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (no_template / name).write_bytes((TINY_MODEL / name).read_bytes())
    tokenizer = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
    (no_template / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": None}))
    no_truth = json.dumps({k: v for k, v in GOOD_ROW.items() if k != "ground_truth"})
    unknown = json.dumps(GOOD_ROW | {"dataset": "gsm9k"})

    def data(name: str, lines: list[str]) -> dict[str, object]:
        return {"dataset_mixer_list": [write_rows(tmp_path / name, lines), "1.0"]}

    return {
        "unknown flag": ({"learning_rte": "1"}, ["learning_rte", "learning_rate"]),
        "missing model": ({"model_name_or_path": tmp_path / "nowhere"}, ["model_name_or_path", "nowhere"]),
        "no chat template": ({"model_name_or_path": no_template}, ["chat template"]),
        "empty data": ({"dataset_mixer_list": [str(tmp_path / "empty.jsonl"), "1.0"]}, ["empty.jsonl"]),
        "missing data": ({"dataset_mixer_list": [str(tmp_path / "absent.jsonl"), "1.0"]}, ["absent.jsonl"]),
        "broken row": (data("broken.jsonl", [good, good[:-3]]), ["broken.jsonl", "2"]),
        "no ground truth": (data("truth.jsonl", [good, good, no_truth]), ["truth.jsonl", "3", "ground_truth"]),
        "unknown verifier": (data("verifier.jsonl", [good, unknown]), ["verifier.jsonl", "2", "gsm9k", "gsm8k"]),
        "long prompts": (
            {"max_prompt_token_length": 5, "overlong_prompts": "error"},
            ["200", "max_prompt_token_length"],
        ),
        "pack_length": ({"pack_length": 40}, ["pack_length", "40", "80"]),
        "too many learners": ({"num_learners_per_node": 500}, ["num_learners_per_node", "500"]),
        "too many engines": ({"vllm_num_engines": 500}, ["vllm_num_engines", "500"]),
        "zero prompts": ({"num_unique_prompts_rollout": 0}, ["num_unique_prompts_rollout", "0"]),
        "no system prompt": ({"system_prompt_override_file": tmp_path / "none.txt"}, ["system_prompt_override_file"]),
        "negative steps": ({"async_steps": -1}, ["async_steps", "-1"]),
    }


@pytest.mark.parametrize(
    "case",
    [
        "unknown flag",
        "missing model",
        "no chat template",
        "empty data",
        "missing data",
        "broken row",
        "no ground truth",
        "unknown verifier",
        "long prompts",
        "pack_length",
        "too many learners",
        "too many engines",
        "zero prompts",
        "no system prompt",
        "negative steps",
    ],
)
def test_a_mistake_is_told_at_once(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    from open_instruct import grpo_fast

    (tmp_path / "empty.jsonl").write_text("")
    options, expected = bad_inputs(tmp_path)[case]
    with pytest.raises(SystemExit) as exit_info:
        grpo_fast.read_options_and_data(command(tmp_path / "out", **options)[2:])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert all(part in message for part in expected), message
    assert not (tmp_path / "out").exists()


def test_all_mistakes_come_in_one_message_without_a_traceback(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [json.dumps(GOOD_ROW | {"dataset": "gsm9k"}), "{"])
    words = command(
        tmp_path / "out", learning_rte=1, pack_length=8, num_unique_prompts_rollout=0, dataset_mixer_list=[data, "1.0"]
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 15  # CPU-seconds, because the machine may be busy
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in ("learning_rte", "pack_length", "num_unique_prompts_rollout", "gsm9k", "rows.jsonl"):
        assert part in done.stderr, done.stderr
