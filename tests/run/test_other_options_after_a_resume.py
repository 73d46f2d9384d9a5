"""The driver goes on from a checkpoint with other options, as `docs/preemption.md` says; everybody else is played."""

from pathlib import Path

from driver_fakes import NUM_STEPS, go, played_run
from test_step_loop import evaluated_steps, logging_as_before, trained_steps  # noqa: F401 - a fixture

from open_instruct.run.run_saving import checkpoint_store

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
