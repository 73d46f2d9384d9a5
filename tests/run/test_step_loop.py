"""The driver's step loop with parts that are played: what a signal does in each phase, and what a resumed run repeats."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from conftest import make_args
from driver_fakes import (  # noqa: F401 - a fixture
    NUM_STEPS,
    PowerLoss,
    batch_progress,
    go,
    played_around,
    played_run,
)
from whole_runs import assert_each_prompt_once, prompts_by_step, rows

from open_instruct import grpo_fast
from open_instruct.cluster.failures import ComponentDied
from open_instruct.data.run_identity import run_identity
from open_instruct.learners.step_sums import NONFINITE_STEPS
from open_instruct.report import run_log
from open_instruct.rollouts.batch_progress import RolloutNews
from open_instruct.run import fully_async_trainer, parameter_synchronizer, step_loop
from open_instruct.run.device_sharing import DeviceSharing
from open_instruct.run.run_saving import checkpoint_store, resumes_the_same_run
from open_instruct.storage.checkpoints import STATE_FILE


def evaluated_steps(out: Path) -> list[int]:
    return [row["training_step"] for row in rows(out / "metrics.jsonl") if "eval/pass_at_1" in row]


def trained_steps(out: Path) -> list[int]:
    return [row["training_step"] for row in rows(out / "metrics.jsonl") if "scores" in row]


def assert_nothing_is_lost_or_repeated(out: Path) -> None:
    """Every step has its row of metrics once, and every prompt its fate."""
    assert trained_steps(out) == list(range(1, NUM_STEPS + 1))
    assert len(prompts_by_step(out)) == NUM_STEPS
    assert_each_prompt_once(out)


def test_a_run_without_incident(tmp_path: Path) -> None:
    run = played_run(tmp_path)
    assert go(run) == 0
    assert_nothing_is_lost_or_repeated(tmp_path)
    assert evaluated_steps(tmp_path) == [2, 4, 6]
    assert run.progress.eval_accuracy_after == 0.06
    assert {what: limit for what, limit in run.components.limits.items() if limit} == {
        **{f"training step {step}": "progress_timeout_s" for step in range(1, NUM_STEPS + 1)},
        **{f"the evaluation of version {step}": "eval_timeout_s" for step in (2, 4, 6)},
        **{f"weights of version {step}": "weight_sync_timeout_s" for step in range(NUM_STEPS + 1)},
        "the connection of learners and engines": "init_timeout_s",
        "saving the model": "init_timeout_s",
    }


def test_an_engine_that_dies_while_the_model_is_saved_costs_nothing(tmp_path: Path) -> None:
    """There may be no restart left, and without checkpoints the whole run would be lost."""
    run = played_run(tmp_path)
    run.components.engine_is_dead_during = "saving the model"
    assert go(run) == 0
    assert (tmp_path / "model" / "model.safetensors").read_text() == str(NUM_STEPS)


@pytest.mark.parametrize("share_devices", [False, True])
def test_prompts_travel_beside_the_weights_unless_devices_are_shared(tmp_path: Path, share_devices: bool) -> None:
    run = played_run(tmp_path)
    run.components.sharing.is_exclusive = share_devices
    calls = run.components.rollouts.controller.calls
    update_weights = run.components.learners.async_update_weights
    prompts_are_admitted = {}

    def noting(version: int, engines: list[int]) -> list[Any]:
        prompts_are_admitted[version] = ("set_version", version) in calls
        return update_weights(version, engines)

    run.components.learners.async_update_weights = noting
    assert go(run) == 0
    assert prompts_are_admitted == {0: False} | dict.fromkeys(range(1, NUM_STEPS + 1), not share_devices)
    for step in (2, 4, 6):  # evaluations
        assert calls.index(("start_evaluation", step, ("held_out",))) < calls.index(("set_version", step))


def test_steps_without_a_finite_gradient_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fully_async_trainer, "merge_step_metrics", lambda reports: {NONFINITE_STEPS: 1})
    run = played_run(tmp_path, max_nonfinite_steps=3)
    run.components.shut_down = run.components.wait_until_ready = lambda *_: None
    monkeypatch.setattr(grpo_fast, "watched", lambda *_: run.components)
    monkeypatch.setattr(grpo_fast, "wire", lambda *_: run)
    for part in ("create_message_queue", "create_placement_groups", "create_actor_group", "create_rollout_manager"):
        monkeypatch.setattr(grpo_fast, part, MagicMock())
    for part in ("node_ids", "check_storage"):
        monkeypatch.setattr(grpo_fast, part, lambda *_: [])
    monkeypatch.setattr(grpo_fast, "ray_cluster", lambda *_: nullcontext(run.components.signals))
    monkeypatch.setattr(grpo_fast, "PickledQueue", lambda *_: None)
    monkeypatch.setattr(grpo_fast, "queue_actor_options", dict)
    inputs: Any = SimpleNamespace(
        reports=[], eval_dataset=None, template=SimpleNamespace(text="the chat template"), warnings=[]
    )
    assert grpo_fast.run(run.args, inputs) == 1
    run.log.close()
    assert trained_steps(tmp_path) == [1, 2, 3]
    newest = run.store.newest()  # with the weights of the last step that had a finite gradient
    assert newest is not None
    assert newest.state["progress"]["training_step"] == 3


def test_a_run_begins_with_the_workflow_and_the_option_that_implied_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = make_args(output_dir=str(tmp_path / "out"), rollout_workflow="conversation", given={"max_steps": 3})
    inputs: Any = SimpleNamespace(
        reports=[], eval_dataset=None, template=SimpleNamespace(text="the chat template"), warnings=[]
    )
    cluster = Mock(side_effect=KeyboardInterrupt)  # the run ends here
    monkeypatch.setattr(grpo_fast, "ray_cluster", cluster)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        grpo_fast.run(args, inputs)
    assert "workflow: conversation (because of --max_steps)" in caplog.text


def test_a_replacement_waits_for_learners_as_long_as_a_partial_batch_may_take(tmp_path: Path) -> None:
    run = played_run(tmp_path, num_batches=3)
    run.components.engines_die_during = "the batch of step 3"
    assert go(run) == 0
    assert run.components.limits["the version of the learners' weights"] == "progress_timeout_s"
    assert_nothing_is_lost_or_repeated(tmp_path)


def test_a_directory_of_checkpoints_that_cannot_be_used_is_told_under_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "states").touch()
    args = make_args(output_dir=str(tmp_path / "out"), checkpoint_state_dir=str(tmp_path / "states"))
    with pytest.raises(SystemExit):
        grpo_fast.run(args, SimpleNamespace())  # type: ignore[arg-type]
    assert f"--checkpoint_state_dir {tmp_path / 'states'}: File exists" in capsys.readouterr().err


# --- SIGTERM, phase by phase ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "saved_step", "evaluated"),
    [
        ({"during": "the batch of step 3"}, 2, [2, 4, 6]),
        # A partial batch of step 3 is trained already: the half step is given up, and all of its prompts come again.
        ({"during": "the batch of step 3", "at_time": 2, "num_batches": 3}, 2, [2, 4, 6]),
        ({"during": "training step 3"}, 3, [3, 4, 6]),
        # Its evaluation was to begin with the weights of this step: the resumed run begins with it.
        ({"during": "training step 4"}, 4, [2, 4, 6]),
        ({"during": "the evaluation of version 2"}, 3, [3, 4, 6]),
        ({"during": "the evaluation of version 6"}, 6, [2, 4, 6]),
        ({"during": "weights of version 3"}, 3, [2, 4, 6]),
        ({"during": "weights of version 4"}, 4, [2, 4, 6]),
        ({"during": "saving a checkpoint", "checkpoint_state_freq": 3}, 3, [2, 4, 6]),
        ({"during": "the ledger"}, 1, [2, 4, 6]),
    ],
    ids=lambda value: value.get("during", "") if isinstance(value, dict) else None,
)
def test_sigterm_saves_where_the_run_stands_in_every_phase(
    tmp_path: Path, phase: dict[str, Any], saved_step: int, evaluated: list[int]
) -> None:
    run = played_run(tmp_path, **phase)
    assert go(run) == 85
    assert run.components.health.is_ending
    newest = run.store.newest()
    assert newest is not None
    assert newest.state["progress"]["training_step"] == saved_step
    assert (newest.path / "weights").read_text() == str(saved_step)
    assert trained_steps(tmp_path) == list(range(1, saved_step + 1))
    assert run.progress.num_total_tokens == 100 * saved_step
    assert go(played_run(tmp_path, num_batches=phase.get("num_batches", 1))) == 0
    assert_nothing_is_lost_or_repeated(tmp_path)
    assert evaluated_steps(tmp_path) == evaluated


def test_sigterm_in_a_sync_that_fails_ends_it_after_the_attempt(tmp_path: Path) -> None:
    """The learners are in the middle of the attempt, and could not save before its end; there is no second one."""
    run = played_run(tmp_path, during="weights of version 3", max_sync_retries=5)
    failing = [{}, {}, {}, {1: "deaf"}, {1: "deaf"}]  # versions 0, 1, 2, and two attempts of 3
    run.components.learners.sync_failures = list(failing)
    assert go(run) == 85
    assert run.components.waits.count("weights of version 3") == 1
    assert run.components.supervisor.replaced == []
    assert run.progress.training_step == 3
    assert go(played_run(tmp_path)) == 0
    assert_nothing_is_lost_or_repeated(tmp_path)


def test_sigterm_in_a_learner_s_step_skips_what_comes_after_it(tmp_path: Path) -> None:
    run = played_run(tmp_path, during="training step 3")
    assert go(run) == 85
    after = run.components.waits[run.components.waits.index("training step 3") + 1 :]
    assert "weights of version 3" not in after
    assert after.count("the evaluation of version 2") == 1  # left at once
    assert "the evaluation's metrics" not in after


def test_sigterm_while_the_weights_of_the_start_are_sent_leaves_at_once(tmp_path: Path) -> None:
    run = played_run(tmp_path, during="the connection of learners and engines")
    assert go(run) == 85
    assert run.store.newest() is None
    assert go(played_run(tmp_path)) == 0
    assert_nothing_is_lost_or_repeated(tmp_path)


def test_sigterm_while_a_checkpoint_is_loaded_leaves_the_summary_as_it_is(tmp_path: Path) -> None:
    assert go(played_run(tmp_path, during="training step 3")) == 85
    summary = (tmp_path / run_log.SUMMARY_FILE).read_bytes()
    assert go(played_run(tmp_path, during="loading ")) == 85
    assert (tmp_path / run_log.SUMMARY_FILE).read_bytes() == summary
    assert go(played_run(tmp_path)) == 0
    assert_nothing_is_lost_or_repeated(tmp_path)


def test_at_the_end_engines_on_shared_devices_that_gave_way_are_not_asked_again(tmp_path: Path) -> None:
    """One of them may hang in the update that the signal ended."""

    class Turns(DeviceSharing):
        taken_over = 0

        def learners_take_over(self) -> None:
            self.taken_over += 1

        def learners_only(self) -> Any:
            raise AssertionError("engines would be woken up again")

    run = played_run(tmp_path, during="training step 3")
    run.components.sharing = turns = Turns()
    assert go(run) == 85
    assert turns.taken_over == 1


@pytest.mark.parametrize(("version", "evaluated"), [(2, [4, 6]), (6, [2, 4, 6])])
def test_an_evaluation_goes_on_with_new_engines_while_the_learners_have_its_weights(
    tmp_path: Path, version: int, evaluated: list[int]
) -> None:
    """As after the last step. While step 3 is trained, nobody has the weights of version 2 any more."""
    run = played_run(tmp_path)
    run.components.engines_die_during = f"the evaluation of version {version}"
    assert go(run) == 0
    assert evaluated_steps(tmp_path) == evaluated
    assert run.components.supervisor.serving == {0: "engine 0 again", 1: "engine 1 again"}
    assert ("giving up the evaluation" in run.components.waits) == (version == 2)  # before the next one may begin
    assert_nothing_is_lost_or_repeated(tmp_path)


@pytest.mark.parametrize(("version", "evaluated"), [(2, [4, 6]), (6, [2, 4, 6])])
def test_an_evaluation_does_not_wait_for_an_engine_that_has_discarded_its_weights(
    tmp_path: Path, version: int, evaluated: list[int]
) -> None:
    """It would wait until `--eval_timeout_s` ends the run. The learners give the weights of version 6 to the engine again."""
    run = played_run(tmp_path)
    run.components.prompts_come_to_a_sleeper_during = f"the evaluation of version {version}"
    assert go(run) == 0
    assert evaluated_steps(tmp_path) == evaluated
    assert ("giving up the evaluation" in run.components.waits) == (version == 2)  # before the next one may begin
    assert not run.components.supervisor.needs_weights
    assert not run.components.supervisor.needs_weights_to_evaluate
    assert_nothing_is_lost_or_repeated(tmp_path)


# --- what is told before a step is over -------------------------------------------------------------------------------


def evaluated_while_waiting(run: Any) -> Any:
    """The evaluation of step 0 is complete while the first batch is awaited."""
    run.components.controller.evaluation_is_complete = True
    return run


def test_the_evaluation_of_step_0_is_told_before_step_1_is_trained(tmp_path: Path) -> None:
    run = evaluated_while_waiting(played_run(tmp_path, eval_on_step_0=True))
    train = run.components.learners.async_train
    at_first_training: list[list[int]] = []

    def noting(*args: Any) -> Any:
        at_first_training.append(evaluated_steps(tmp_path))
        return train(*args)

    run.components.learners.async_train = noting
    assert go(run) == 0
    assert at_first_training[0] == [0]
    assert evaluated_steps(tmp_path) == [0, 2, 4, 6]
    assert run.progress.eval_accuracy_before == 0.0
    assert_nothing_is_lost_or_repeated(tmp_path)


@pytest.mark.parametrize("end", ["SIGTERM", "a failure"])
def test_a_complete_evaluation_is_told_when_the_run_ends_before_step_1(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = played_run(tmp_path, eval_on_step_0=True, during="the batch of step 1" if end == "SIGTERM" else "")
    wait = run.components.wait

    def complete_at_the_end(refs: Any, *, subject: str, **settings: Any) -> Any:
        if subject == "the batch of step 1":
            run.components.controller.evaluation_is_complete = True
            if end == "a failure":
                raise ComponentDied("engine 0 died")
        return wait(refs, subject=subject, **settings)

    run.components.wait = complete_at_the_end
    if end == "SIGTERM":
        assert go(run) == 85
        assert summary_of(tmp_path)["eval_accuracy_before"] == 0.0
    else:
        with pytest.raises(ComponentDied):
            go(run)
    assert evaluated_steps(tmp_path) == [0]


def test_prompts_that_a_step_leaves_out_are_written_while_it_waits(tmp_path: Path) -> None:
    run = played_run(tmp_path, during="the batch of step 1")
    left_out: list[dict[str, object]] = [{"prompt_id": "train-0", "row": "x line 1", "fate": "zero_std"}]
    run.components.controller.news = lambda: RolloutNews(["no score above 0"], False, {1: left_out}, batch_progress())
    run.components.controller.close_ledger = lambda: {
        "issued": 2,
        "consumed": 0,
        "dropped": {"zero_std": 2},
        "reissued": 0,
        "left_out": {1: [{"prompt_id": "train-1"}]},
    }
    assert go(run) == 85
    assert rows(tmp_path / "prompts.jsonl") == [
        {"training_step": 1, "prompts": left_out},
        {"training_step": 1, "prompts": [{"prompt_id": "train-1"}]},
    ]


# --- what a resumed run repeats ---------------------------------------------------------------------------------------


def test_an_evaluation_that_is_written_is_not_made_again_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint of step 2 was written while its evaluation was under way, which then ended before the power did."""
    with pytest.raises(PowerLoss):
        go(played_run(tmp_path, during="the batch of step 4", power_fails=True, checkpoint_state_freq=2))
    assert evaluated_steps(tmp_path) == [2]
    run = played_run(tmp_path, during="the batch of step 3", checkpoint_state_freq=2)
    assert go(run) == 85
    assert run.components.controller.evaluating is None
    assert run.progress.eval_accuracy_after == 0.02
    assert go(played_run(tmp_path)) == 0
    assert evaluated_steps(tmp_path) == [2, 4, 6]
    assert_nothing_is_lost_or_repeated(tmp_path)


def test_an_evaluation_that_was_cut_off_is_made_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(PowerLoss):
        go(played_run(tmp_path, during="the evaluation of version 2", power_fails=True, checkpoint_state_freq=2))
    assert evaluated_steps(tmp_path) == []
    assert go(played_run(tmp_path)) == 0
    assert evaluated_steps(tmp_path) == [2, 4, 6]


def test_a_torn_checkpoint_is_told_when_the_run_goes_on_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PowerLoss):
        go(played_run(tmp_path, during="the batch of step 5", power_fails=True, checkpoint_state_freq=2))
    store = checkpoint_store(make_args(output_dir=str(tmp_path)))
    (store.path(4) / STATE_FILE).write_text("")
    run = played_run(tmp_path, checkpoint_state_freq=2)
    run.message_queue.next_partial_batch = (3, 0)
    assert go(run) == 0
    assert f"a newer checkpoint is not whole and is passed over: {store.path(4)}" in caplog.text
    assert f"going on from {store.path(2)} after step 2" in caplog.text
    assert_nothing_is_lost_or_repeated(tmp_path)
    assert store.has(4)


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = played_run(tmp_path, during="training step 3")
    run.identity = {"seed": 1}
    assert go(run) == 85
    assert go(played_run(tmp_path)) == 0
    assert caplog.text.count("whether data and tokenizer are still the same is not known") == 1


def test_options_that_a_resumed_run_has_changed_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert go(played_run(tmp_path, during="training step 3")) == 85
    assert go(played_run(tmp_path, during="the batch of step 5", num_batches=1, max_nonfinite_steps=7)) == 85
    assert go(played_run(tmp_path, max_nonfinite_steps=7)) == 0
    told = [record.getMessage() for record in caplog.records if "have changed since" in record.getMessage()]
    assert told == ["options that have changed since the checkpoint: max_nonfinite_steps 10 → 7"]


# --- wall time --------------------------------------------------------------------------------------------------------


@pytest.fixture
def played_time(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A run in which a step waits 5 s for its batch and trains 1 s, a checkpoint takes 10 s, an evaluation 100 s, and saving the
    model 1000 s; and what else a test says."""
    seconds: dict[str, float] = {
        "the batch": 5,
        "training": 1,
        "saving a": 10,
        "the evaluation of": 100,
        "saving the": 1000,
    }
    now = 0.0

    def make(output_dir: Path, *, further_seconds: dict[str, float] | None = None, **options: Any) -> Any:
        seconds.update(further_seconds or {})
        run = played_run(output_dir, **options)
        wait = run.components.wait

        def lasting(refs: Any, *, subject: str, **settings: Any) -> Any:
            nonlocal now
            now += sum(length for name, length in seconds.items() if subject.startswith(name))
            return wait(refs, subject=subject, **settings)

        run.components.wait = lasting
        return run

    clocks = SimpleNamespace(perf_counter=lambda: now, time=lambda: now, sleep=lambda _: None)
    monkeypatch.setattr(step_loop, "time", clocks)
    monkeypatch.setattr(parameter_synchronizer, "time", clocks)
    return make


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / run_log.SUMMARY_FILE).read_text())


def times_of_steps(out: Path) -> list[float]:
    return [row["time/total"] for row in rows(out / "metrics.jsonl") if "time/total" in row]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_parts_of_the_first_row_do_not_hold_what_was_before_the_clock(
    tmp_path: Path, played_time: Callable[..., Any], is_resumed: bool
) -> None:
    """The first send takes 50 s longer than the others, which take 2 s, and nothing of it belongs to a step."""
    first = 0
    if is_resumed:
        assert go(played_time(tmp_path, during="the batch of step 3", local_eval_every=-1)) == 85
        first = 2
    seconds = {"weights of version": 2, f"weights of version {first}": 50}
    run = played_time(tmp_path, further_seconds=seconds, local_eval_every=-1)
    handed_over = {"time/learners_onload": 30.0}
    run.components.sharing.take_metrics = lambda: dict([handed_over.popitem()]) if handed_over else {}
    assert go(run) == 0
    new = [row for row in rows(tmp_path / "metrics.jsonl") if row["training_step"] > first]
    assert [row["time/weight_sync"] for row in new] == [2] * (NUM_STEPS - first)
    assert [row["time/total"] for row in new] == [5 + 1 + 2] * (NUM_STEPS - first)
    assert not any("time/learners_onload" in row for row in new)


def test_saving_a_checkpoint_is_in_the_time_of_the_next_step(tmp_path: Path, played_time: Callable[..., Any]) -> None:
    assert go(played_time(tmp_path, checkpoint_state_freq=1)) == 0
    trained = [row for row in rows(tmp_path / "metrics.jsonl") if "time/total" in row]
    assert times_of_steps(tmp_path) == [6, 16, 116, 16, 116, 16]  # steps 3 and 5 wait for evaluations
    assert ["time/saving" in row for row in trained] == [False, True, True, True, True, True]
    assert trained[1]["learner_response_tokens_per_second_step"] == 100 / 16
    assert trained[-1]["learner_response_tokens_per_second_overall"] == 600 / 286
    summary = summary_of(tmp_path)
    assert summary["wall_seconds"] == 286 + 10 + 100 + 1000  # the last checkpoint, the last evaluation, the model
    assert summary["tokens_per_second"] == 600 / 1396


def test_wall_time_of_a_resumed_run_goes_on_from_its_checkpoint(
    tmp_path: Path, played_time: Callable[..., Any]
) -> None:
    assert go(played_time(tmp_path, during="the batch of step 3")) == 85
    assert times_of_steps(tmp_path) == [6, 6]
    assert summary_of(tmp_path)["wall_seconds"] == 6 + 6 + 5 + 10  # the open step, and the checkpoint of step 2
    run = played_time(tmp_path, checkpoint_state_freq=4)
    assert go(run) == 0
    assert times_of_steps(tmp_path) == [6, 6, 106, 6, 116, 6]
    trained_and_evaluated = 6 + 6 + 5 + 106 + 6 + 116 + 6 + 100
    assert run.store.newest().state["progress"]["wall_seconds"] == trained_and_evaluated
    assert summary_of(tmp_path)["wall_seconds"] == trained_and_evaluated + 10 + 1000


def test_wall_time_before_the_end_of_the_first_step_counts(tmp_path: Path, played_time: Callable[..., Any]) -> None:
    assert go(played_time(tmp_path, during="the batch of step 1")) == 85
    assert summary_of(tmp_path)["wall_seconds"] == 5
    assert summary_of(tmp_path)["tokens_per_second"] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"during": "the connection of learners and engines"},
            "SIGTERM: leaving without a new checkpoint, because no training step has ended since the start",
        ),
        (
            {"during": "the batch of step 1"},
            "SIGTERM: leaving without a new checkpoint, because no training step has ended since the start",
        ),
        (
            {"during": "the batch of step 3", "checkpoint_state_freq": 1},
            "SIGTERM: leaving without a new checkpoint, because the checkpoint of step 2 is written already",
        ),
        (
            {"during": "the batch of step 3"},
            "SIGTERM: saving a checkpoint, then leaving; the same command goes on from it",
        ),
    ],
    ids=["at the start", "step 1", "written already", "step 3"],
)
def test_sigterm_tells_whether_a_checkpoint_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], said: str
) -> None:
    run = played_run(tmp_path, **options)
    assert go(run) == 85
    assert [message for message in caplog.messages if "leaving" in message] == [said]
    saved = run.store.newest()
    assert (saved.training_step if saved else None) == (2 if "step 3" in options["during"] else None)


# --- before the start -------------------------------------------------------------------------------------------------


def test_a_torn_checkpoint_is_no_traceback_before_the_start(tmp_path: Path) -> None:
    """The newest may be torn: the one before is compared. When all are, the user decides."""
    args = make_args(output_dir=str(tmp_path))
    store = checkpoint_store(args)
    for step in (1, 2):
        state = {"identity": run_identity(args), "progress": {"training_step": step}, "evaluation_of": None}
        store.save(step, state, lambda _: {})
    (store.path(2) / STATE_FILE).write_text("")
    assert resumes_the_same_run(args, None) == []
    assert "--seed was 1, now 2" in resumes_the_same_run(make_args(output_dir=str(tmp_path), seed=2), None)[0]
    (store.path(1) / STATE_FILE).write_text("{")
    [mistake] = resumes_the_same_run(args, None)
    assert mistake.startswith(
        f"--output_dir {tmp_path}: none of its checkpoints is whole: {store.path(2)} (its run_state"
    )
    assert mistake.endswith("Remove the checkpoints to start anew, or give another directory.")


# --- replaced engines -------------------------------------------------------------------------------------------------


def test_the_controller_hears_of_weights_that_engines_got_between_two_syncs(tmp_path: Path) -> None:
    run = played_run(tmp_path, trigger_parameter_sync_step=3, async_steps=2)
    run.components.supervisor.serve([0, 1])
    run.components.learners.version = 5
    step_loop.give_weights_to_replacements(run)
    assert run.components.rollouts.controller.calls == []
    run.components.supervisor.replace(1, "died")
    run.components.supervisor.load(1)
    step_loop.give_weights_to_replacements(run)
    assert run.components.rollouts.controller.calls == [("set_version", 5)]
    run.log.close()


# --- other options after a resume, as docs/guides/preemption.md says ----------------------------------------------------------

STOPPED = "training step 3"


def test_evaluations_and_saved_files_have_the_steps_of_the_new_options(tmp_path: Path) -> None:
    assert go(played_run(tmp_path, during=STOPPED, local_eval_every=-1, checkpoint_state_freq=1)) == 85
    resumed = played_run(tmp_path, local_eval_every=5, checkpoint_state_freq=1, keep_last_n_checkpoints=1, save_freq=4)
    assert go(resumed) == 0
    assert evaluated_steps(tmp_path) == [5, 6]
    assert trained_steps(tmp_path) == list(range(1, NUM_STEPS + 1))
    assert checkpoint_store(resumed.args).steps() == [NUM_STEPS]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000004"]


def test_an_evaluation_that_is_due_at_the_checkpoint_by_the_new_options_is_made_at_once(tmp_path: Path) -> None:
    assert go(played_run(tmp_path, during=STOPPED, local_eval_every=-1)) == 85
    assert go(played_run(tmp_path, local_eval_every=3)) == 0
    assert evaluated_steps(tmp_path) == [3, 6]


def test_another_output_directory_with_the_old_checkpoints_has_the_metrics_from_the_next_step_on(
    tmp_path: Path,
) -> None:
    state = str(tmp_path / "state")
    assert go(played_run(tmp_path / "old", during=STOPPED, checkpoint_state_dir=state)) == 85
    assert go(played_run(tmp_path / "new", checkpoint_state_dir=state)) == 0
    assert trained_steps(tmp_path / "old") == [1, 2, 3]
    assert trained_steps(tmp_path / "new") == [4, 5, 6]


def test_another_output_directory_begins_anew(tmp_path: Path) -> None:
    assert go(played_run(tmp_path / "old", during=STOPPED)) == 85
    assert go(played_run(tmp_path / "new")) == 0
    assert trained_steps(tmp_path / "new") == list(range(1, NUM_STEPS + 1))
