"""A start in a directory whose run left no checkpoint: the old files move to a folder, and the log says so."""

import json
import shutil
from pathlib import Path
from typing import Any

from conftest import make_args

from open_instruct.report.tracker import run_id_at
from open_instruct.run.earlier_run import set_aside
from open_instruct.run.run_saving import checkpoint_store


def files_of_a_run(directory: Path) -> dict[str, str]:
    """Write what a run of two steps leaves. Returns the texts by path."""
    texts = {
        "metrics.jsonl": "".join(json.dumps({"training_step": step}) + "\n" for step in (1, 2)),
        "prompts.jsonl": "{}\n",
        "summary.json": "{}",
        "options.json": "{}",
        "options_1.json": "{}",
        "logs/driver.log": "a line",
        "transcripts/step_000001.txt": "old",
        "samples/step_000002.jsonl": "old",
        "rollouts/grpo__1_rollouts_000002.jsonl": "old",
        "completions/step_000002.jsonl": "old",
        "step_000002/config.json": "{}",
        "model/config.json": "{}",
    }
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return texts


def files_in(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def args_in(directory: Path, **options: Any) -> Any:
    return make_args(output_dir=str(directory), **options)


def test_all_files_of_the_earlier_run_move_and_nothing_else(tmp_path: Path) -> None:
    texts = files_of_a_run(tmp_path)
    (tmp_path / "my_notes.md").write_text("mine")
    (tmp_path / "step_by_step.md").write_text("mine too")
    told = set_aside(args_in(tmp_path))
    assert "the run begins anew at step 1" in told
    assert "up to step 2: metrics.jsonl, prompts.jsonl" in told
    assert told.endswith(f"are in {tmp_path / 'earlier_1'} now")
    assert files_in(tmp_path / "earlier_1") == texts
    assert {path.name for path in tmp_path.iterdir()} == {
        *("earlier_1", "my_notes.md", "step_by_step.md"),
        "wandb_run_number.txt",
    }


def test_each_earlier_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    ids = [run_id_at(tmp_path)]
    for number in (1, 2):
        texts = files_of_a_run(tmp_path)
        assert f"earlier_{number}" in set_aside(args_in(tmp_path))
        assert files_in(tmp_path / f"earlier_{number}") == texts
        ids.append(run_id_at(tmp_path))
    assert len(set(ids)) == 3  # wandb takes no step twice


def test_a_resumed_run_keeps_its_id_when_the_files_of_the_run_before_are_removed(tmp_path: Path) -> None:
    """Else its steps would be mixed with those of the run before in one curve."""
    files_of_a_run(tmp_path)
    ids = [run_id_at(tmp_path)]
    set_aside(args_in(tmp_path))
    ids.append(run_id_at(tmp_path))
    shutil.rmtree(tmp_path / "earlier_1")
    assert run_id_at(tmp_path) == ids[1]
    files_of_a_run(tmp_path)
    set_aside(args_in(tmp_path))
    ids.append(run_id_at(tmp_path))
    assert len(set(ids)) == 3


MINE = "samples/mine.wav", "samples/step_1.jsonl", "logs/other.log", "model/config.json", "rollouts/notes.txt"


def write_mine(directory: Path) -> dict[str, str]:
    for name in MINE:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")
    return dict.fromkeys(MINE, "mine")


def test_folders_of_the_user_stay_where_no_run_was(tmp_path: Path) -> None:
    mine = write_mine(tmp_path) | {"samples/step_000001.jsonl": "mine"}
    (tmp_path / "samples" / "step_000001.jsonl").write_text("mine")
    assert set_aside(args_in(tmp_path)) == ""
    assert files_in(tmp_path) == mine


def test_folders_of_the_user_stay_after_a_start_that_failed_at_once(tmp_path: Path) -> None:
    """It has trained no step, so the model is not its own."""
    mine = write_mine(tmp_path)
    for name in ("metrics.jsonl", "prompts.jsonl", "options.json", "logs/driver.log"):
        (tmp_path / name).write_text("" if name.endswith("jsonl") else "{}")
    assert set_aside(args_in(tmp_path)) == ""
    assert files_in(tmp_path).items() >= mine.items()


def test_files_of_the_user_stay_in_folders_that_a_run_has_written_to(tmp_path: Path) -> None:
    mine = write_mine(tmp_path)
    texts = files_of_a_run(tmp_path)  # its model replaces the user's
    assert "transcripts, samples, rollouts, model" in set_aside(args_in(tmp_path))
    assert files_in(tmp_path / "earlier_1") == texts
    left = {name: text for name, text in files_in(tmp_path).items() if not name.startswith("earlier_1")}
    del mine["model/config.json"]
    assert left == mine | {"wandb_run_number.txt": "1\n"}


def test_a_folder_with_samples_that_the_new_run_reads_stays(tmp_path: Path) -> None:
    files_of_a_run(tmp_path)
    samples = tmp_path / "samples"
    assert "; samples/step_000002.jsonl stays" in set_aside(args_in(tmp_path, dataset_mixer_list=[str(samples), "1.0"]))
    assert (samples / "step_000002.jsonl").is_file()


def test_a_run_with_a_checkpoint_goes_on_amid_its_files(tmp_path: Path) -> None:
    texts = files_of_a_run(tmp_path)
    checkpoint_store(args_in(tmp_path)).save(2, {"progress": {"training_step": 2}}, lambda _: {})
    assert set_aside(args_in(tmp_path)) == ""
    assert files_in(tmp_path).items() >= texts.items()


def test_a_start_that_failed_at_once_leaves_nothing_to_move(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("metrics.jsonl", "prompts.jsonl", "options.json", "logs/driver.log"):
        (tmp_path / name).write_text("" if name.endswith("jsonl") else "{}")
    before = files_in(tmp_path)
    assert set_aside(args_in(tmp_path)) == ""
    assert files_in(tmp_path) == before
    assert set_aside(args_in(tmp_path / "new")) == ""


def test_what_the_new_run_reads_stays(tmp_path: Path) -> None:
    """Its model may be the one that the earlier run has trained."""
    files_of_a_run(tmp_path)
    told = set_aside(args_in(tmp_path, model_name_or_path=str(tmp_path / "model")))
    assert told.endswith("; model stays, because this run reads it")
    assert (tmp_path / "model" / "config.json").is_file()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rollouts_in_a_directory_of_their_own_move_too(tmp_path: Path) -> None:
    """Other runs may have their rollouts there, under other names."""
    files_of_a_run(tmp_path / "out")
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("mine_rollouts_000001.jsonl", "mine_metadata.jsonl", "other_rollouts_000001.jsonl"):
        (shared / name).write_text(name)
    told = set_aside(args_in(tmp_path / "out", run_name="mine", rollouts_save_path=str(shared)))
    assert told.endswith(f"its rollouts in {shared / 'earlier_1'}")
    assert set(files_in(shared)) == {
        "earlier_1/mine_rollouts_000001.jsonl",
        "earlier_1/mine_metadata.jsonl",
        "other_rollouts_000001.jsonl",
    }
