"""Directories that are there whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from open_instruct.checkpoints import STATE_FILE, CheckpointStore, different_options, written_whole


def write_weights(path: Path) -> None:
    (path / "weights").mkdir()
    (path / "weights" / "rank_0").write_text("new")


def write_half_and_fail(path: Path) -> None:
    (path / "half").write_text("half")
    raise OSError("disk full")


def files(directory: Path) -> list[str]:
    """What is seen of a directory, hidden things left out."""
    return sorted(str(path.relative_to(directory)) for path in directory.iterdir() if not path.name.startswith("."))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "states", keep_last=2)


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with written_whole(target) as beside:
        (beside / "a").write_text("1")
        assert not target.exists()
        assert beside.parent == target.parent  # on the same file system: a rename is enough
    assert files(target) == ["a"]
    assert os.listdir(target.parent) == ["model"]


def test_a_new_directory_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("old", "new"):
        with written_whole(target) as beside:
            (beside / name).write_text(name)
    assert files(target) == ["new"]


def test_an_error_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with written_whole(target) as beside:
        (beside / "old").write_text("old")
    with pytest.raises(OSError, match="disk full"), written_whole(target) as beside:
        write_half_and_fail(beside)
    assert (target / "old").read_text() == "old"
    assert files(target) == ["old"]


def test_leftovers_of_a_killed_writer_do_not_get_in(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk full"), written_whole(target) as beside:
        write_half_and_fail(beside)
    assert not target.exists()
    with written_whole(target) as beside:
        write_weights(beside)
    assert files(target) == ["weights"]


def test_without_a_checkpoint_there_is_no_newest(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.newest() is None


def test_a_checkpoint_comes_back(store: CheckpointStore) -> None:
    state = {"progress": {"training_step": 7, "wall_seconds": 1.25, "eval": None}, "names": ["ä", "b"]}
    path = store.save(7, state, write_weights)
    assert path == store.path(7)
    assert path.name == "step_000007"
    assert store.newest() == (path, state)
    assert (path / "weights" / "rank_0").read_text() == "new"


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=-1)
    # As text, the last comes before the second.
    for step in (2, 999_999, 1_000_000):
        store.save(step, {"step": step}, write_weights)
    assert store.steps() == [2, 999_999, 1_000_000]
    newest = store.newest()
    assert newest is not None
    assert newest[1] == {"step": 1_000_000}


def test_a_writer_that_fails_leaves_the_checkpoints_before(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    store.save(2, {"step": 2}, write_weights)
    for step in (2, 3):
        with pytest.raises(OSError, match="disk full"):
            store.save(step, {"step": "torn"}, write_half_and_fail)
    assert store.steps() == [1, 2]
    assert store.newest() == (store.path(2), {"step": 2})
    assert files(store.path(2)) == [STATE_FILE, "weights"]


def test_a_state_that_is_not_json_makes_no_checkpoint(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    with pytest.raises(TypeError):
        store.save(2, {"step": object()}, write_weights)
    assert store.steps() == [1]


def test_while_a_checkpoint_is_written_the_one_before_is_the_newest(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    seen: list[object] = []
    store.save(2, {"step": 2}, lambda path: seen.append(store.newest()))
    assert seen == [(store.path(1), {"step": 1})]


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4]), (-1, [1, 2, 3, 4])]
)
def test_the_newest_are_kept(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep_last=keep_last)
    for step in range(1, 5):
        store.save(step, {"step": step}, write_weights)
    assert store.steps() == kept
    assert files(tmp_path) == [f"step_{step:06d}" for step in kept]


def test_the_oldest_goes_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"step": 1}, write_weights)
    with pytest.raises(OSError, match="disk full"):
        store.save(2, {"step": 2}, write_half_and_fail)
    assert store.steps() == [1]


def test_a_directory_without_state_is_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(1, {"step": 1}, write_weights)
    (tmp_path / "states" / "step_000009").mkdir()
    assert store.steps() == [1]


def test_a_writer_killed_at_its_last_step_leaves_no_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, {"step": 1}, write_weights)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, {"step": 2}, write_weights)
    assert store.steps() == [1]
    store.save(2, {"step": 2}, write_weights)
    assert store.steps() == [1, 2]


def test_different_options() -> None:
    saved = {"seed": 1, "run_name": "a", "gone": 3}
    assert different_options(saved, {"seed": 1, "run_name": "a"}) == []
    assert different_options(saved, {"seed": 2, "run_name": "b"}) == [
        "--seed was 1, now 2",
        "--run_name was 'a', now 'b'",
    ]


def test_different_options_survive_json() -> None:
    options = {"dataset_mixer_list": ["a", "1.0"], "eval_top_p": None, "learning_rate": 2e-5}
    assert different_options(json.loads(json.dumps(options)), options) == []
