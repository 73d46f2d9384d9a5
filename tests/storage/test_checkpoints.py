"""Directories that are there whole or not at all."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from open_instruct.storage import checkpoints
from open_instruct.storage.checkpoints import (
    STATE_FILE,
    Checkpoint,
    CheckpointStore,
    NoWholeCheckpoint,
    StorageNotShared,
    atomic_directory,
    sync_files_of_rank,
)


def write_weights(path: Path) -> dict[str, int]:
    (path / "weights").mkdir()
    (path / "weights" / "rank_0").write_text("new")
    return {"weights/rank_0": 3}


def write_half_and_fail(path: Path) -> dict[str, int]:
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
    with atomic_directory(target) as beside:
        (beside / "a").write_text("1")
        assert not target.exists()
        assert beside.parent == target.parent  # on the same file system: a rename is enough
    assert files(target) == ["a"]
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_new_directory_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(checkpoints, "_exchange", lambda *_: False)
    target = tmp_path / "model"
    for name in ("old", "new", "newest"):
        with atomic_directory(target) as beside:
            (beside / name).write_text(name)
        assert files(target) == [name]
        assert os.listdir(tmp_path) == ["model"]
        (tmp_path / ".model.old").mkdir()  # as after a kill right behind the second rename
        (tmp_path / ".model.old" / "older").write_text("older")


def test_an_error_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as beside:
        (beside / "old").write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_directory(target) as beside:
        write_half_and_fail(beside)
    assert (target / "old").read_text() == "old"
    assert files(target) == ["old"]


def test_leftovers_of_a_killed_writer_do_not_get_in(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk full"), atomic_directory(target) as beside:
        write_half_and_fail(beside)
    assert not target.exists()
    with atomic_directory(target) as beside:
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
    assert store.newest() == Checkpoint(path, state)
    assert (path / "weights" / "rank_0").read_text() == "new"


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=-1)
    # As text, the last comes before the second.
    for step in (2, 999_999, 1_000_000):
        store.save(step, {"step": step}, write_weights)
    assert store.steps() == [2, 999_999, 1_000_000]
    newest = store.newest()
    assert newest is not None
    assert newest.state == {"step": 1_000_000}


def test_a_writer_that_fails_leaves_the_checkpoints_before(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    store.save(2, {"step": 2}, write_weights)
    for step in (2, 3):
        with pytest.raises(OSError, match="disk full"):
            store.save(step, {"step": "torn"}, write_half_and_fail)
    assert store.steps() == [1, 2]
    assert store.newest() == Checkpoint(store.path(2), {"step": 2})
    assert files(store.path(2)) == [STATE_FILE, "weights"]


def test_a_state_that_is_not_json_makes_no_checkpoint(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    with pytest.raises(TypeError):
        store.save(2, {"step": object()}, write_weights)
    assert store.steps() == [1]


def test_while_a_checkpoint_is_written_the_one_before_is_the_newest(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    results: list[object] = []

    def look(path: Path) -> dict[str, int]:
        results.append(store.newest())
        return write_weights(path)

    store.save(2, {"step": 2}, look)
    assert results == [Checkpoint(store.path(1), {"step": 1})]


@pytest.mark.parametrize(
    ("keep_last", "steps"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4]), (-1, [1, 2, 3, 4])]
)
def test_the_newest_are_kept(tmp_path: Path, keep_last: int, steps: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep_last=keep_last)
    for step in range(1, 5):
        store.save(step, {"step": step}, write_weights)
    assert store.steps() == steps
    assert files(tmp_path) == [f"step_{step:06d}" for step in steps]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a file that somebody reads stays under another name, and its directory with it."""

    def remove(path: Path, ignore_errors: bool = False) -> None:
        if path.exists() and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"step": 1}, write_weights)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", remove)
    store.save(2, {"step": 2}, write_weights)
    assert store.steps() == [2]
    assert f"{store.path(1)}: the old checkpoint cannot be removed whole: Directory not empty" in caplog.text


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


# --- killed between two renames ---------------------------------------------------------------------------------------

KILLED = """
import os, shutil, sys
from pathlib import Path
from open_instruct.storage import checkpoints

directory, way, moment = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
calls = 0

def mortal(call):
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            os._exit(9)
        return call(*args, **kwargs)
    return counted

if way == "two renames":
    checkpoints._exchange = lambda *_: False
checkpoints._exchange, Path.rename = mortal(checkpoints._exchange), mortal(Path.rename)
shutil.rmtree, os.fsync = mortal(shutil.rmtree), mortal(os.fsync)
store = checkpoints.CheckpointStore(directory, keep_last=-1)
store.save(2, {"from": "new"}, lambda path: (path / "weights").write_text("new") and {})
"""


@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_a_writer_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, way: str) -> None:
    outcomes = []
    for moment in range(1, 30):
        store = CheckpointStore(tmp_path / str(moment), keep_last=-1)
        store.save(2, {"from": "old"}, lambda path: {"weights": (path / "weights").write_text("old")})
        words = [sys.executable, "-c", KILLED, str(store.path(2).parent), way, str(moment)]
        process = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == 9, process.stderr
        assert store.path(2).exists() or way == "two renames"
        with pytest.raises(OSError, match="disk full"), atomic_directory(store.path(2)) as beside:
            write_half_and_fail(beside)  # it begins by removing what was left
        newest = store.newest()
        assert newest is not None
        assert newest.state["from"] == (store.path(2) / "weights").read_text()
        outcomes.append(newest.state["from"])
    else:
        raise AssertionError("it was killed each time")
    assert outcomes == sorted(outcomes, reverse=True)  # the old one up to some moment, then the new one
    assert set(outcomes) == {"old", "new"}


def set_aside(store: CheckpointStore, step: int) -> Path:
    """As after a kill between the two renames."""
    return store.path(step).rename(store.path(step).with_name(f".{store.path(step).name}.old"))


@pytest.mark.parametrize(
    "look",
    [
        lambda store: store.has(2),
        lambda store: store.steps() == [1, 2],
        lambda store: store.newest().training_step == 2,
        lambda store: store.remove_partial() or store.path(2).is_dir(),
    ],
    ids=["has", "steps", "newest", "remove_partial"],
)
def test_a_checkpoint_that_was_set_aside_is_found_wherever_one_looks(
    store: CheckpointStore, look: Callable[[CheckpointStore], bool]
) -> None:
    for step in (1, 2):
        store.save(step, {"step": step}, write_weights)
    set_aside(store, 2)
    assert look(store)
    assert sorted(os.listdir(store.path(2).parent)) == ["step_000001", "step_000002"]


def test_a_checkpoint_that_was_replaced_does_not_come_back_when_the_new_one_is_dropped(store: CheckpointStore) -> None:
    """A kill right after the second rename leaves the old one aside."""
    store.save(1, {"from": "old"}, write_weights)
    aside = set_aside(store, 1)
    aside.rename(copy := aside.with_name("kept"))
    store.save(1, {"from": "new"}, write_weights)
    copy.rename(aside)
    newest = store.newest()
    assert newest is not None
    assert newest.state == {"from": "new"}
    for step in (2, 3):
        store.save(step, {"step": step}, write_weights)
    assert store.steps() == [2, 3]
    assert sorted(os.listdir(aside.parent)) == ["step_000002", "step_000003"]


def test_what_was_replaced_takes_no_room_of_the_next_run(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_weights)
    set_aside(store, 1).joinpath("large").write_bytes(bytes(1000))
    store.path(1).mkdir()
    store.remove_partial()
    assert os.listdir(store.path(1).parent) == ["step_000001"]
    assert os.listdir(store.path(1)) == []


def test_an_error_between_the_two_renames_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as beside:
        (beside / "old").write_text("old")
    rename = Path.rename

    def fails(path: Path, to: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("storage is gone")
        return rename(path, to)

    monkeypatch.setattr(checkpoints, "_exchange", lambda *_: False, raising=False)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="storage is gone"), atomic_directory(target) as beside:
        (beside / "new").write_text("new")
    assert files(target) == ["old"]
    assert os.listdir(tmp_path) == ["model"]


# --- torn checkpoints -------------------------------------------------------------------------------------------------


def write_as_learners_do(path: Path) -> dict[str, int]:
    """Two learners at ZeRO stage 2 and the controller."""
    (path / "deepspeed").mkdir()
    for name in (
        "deepspeed/mp_rank_00_model_states.pt",
        "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "random_state_0.pt",
        "random_state_1.pt",
        "latest",
        "zero_to_fp32.py",
        "zero_to_torch.py",
    ):
        (path / name).write_text(name)
    (path / "rollout_state.npz").write_text("rollouts")
    return sync_files_of_rank(path, 0) | sync_files_of_rank(path, 1)


def tear(store: CheckpointStore, step: int, damage: str) -> None:
    """What a power loss, a full disk or a copy in part can leave."""
    path, (kind, _, name) = store.path(step), damage.partition(" ")
    if kind == "without":
        (path / name).unlink()
    else:
        os.truncate(path / name, 0 if kind == "empty" else (path / name).stat().st_size // 2)


DAMAGES = [
    f"empty {STATE_FILE}",
    f"half {STATE_FILE}",
    "without rollout_state.npz",
    "half rollout_state.npz",
    "without deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "half deepspeed/mp_rank_00_model_states.pt",
    "empty random_state_1.pt",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_passed_over_and_the_one_before_is_taken(store: CheckpointStore, damage: str) -> None:
    for step in (1, 2):
        store.save(step, {"step": step}, write_as_learners_do)
    tear(store, 2, damage)
    newest = store.newest()
    assert newest is not None
    assert (newest.path, newest.state) == (store.path(1), {"step": 1})
    [passed_over] = newest.passed_over
    assert passed_over.startswith(f"{store.path(2)} (")
    assert damage.partition(" ")[2] in passed_over
    assert not store.has(2)
    store.save(2, {"step": "again"}, write_as_learners_do)
    assert store.newest() == Checkpoint(store.path(2), {"step": "again"})


def test_when_all_checkpoints_are_torn_each_is_named(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, {"step": step}, write_as_learners_do)
        tear(store, step, "without latest")
    with pytest.raises(
        NoWholeCheckpoint, match=r"step_000002 \(latest is missing\); .*step_000001 \(latest is missing"
    ):
        store.newest()


def test_torn_checkpoints_do_not_count_among_those_that_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, {"step": step}, write_as_learners_do)
    tear(store, 2, f"empty {STATE_FILE}")
    store.save(3, {"step": 3}, write_as_learners_do)
    assert [store.has(step) for step in (1, 2, 3)] == [True, False, True]
    store.save(4, {"step": 4}, write_as_learners_do)
    assert store.steps() == [3, 4]


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_as_learners_do)
    (store.path(1) / STATE_FILE).write_text(json.dumps({"step": 1}))
    with pytest.raises(NoWholeCheckpoint, match=r"step_000001 is of format 1, and this program reads 2"):
        store.newest()


def test_a_checkpoint_without_a_list_of_files_is_whole_unless_one_of_them_is_empty(store: CheckpointStore) -> None:
    store.save(1, {"step": 1}, write_as_learners_do)
    (store.path(1) / STATE_FILE).write_text(json.dumps({"step": 1, "format": 2}))
    assert store.newest() == Checkpoint(store.path(1), {"step": 1})
    tear(store, 1, "empty random_state_0.pt")
    with pytest.raises(NoWholeCheckpoint, match=r"random_state_0\.pt has 0 bytes"):
        store.newest()


def test_all_is_on_the_disk_before_the_checkpoint_has_its_name(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        events.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}').rpartition('states')[2]}")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store.save(1, {"step": 1}, write_weights)
    beside = "sync /.step_000001.partial"
    renamed = events.index("rename step_000001")
    assert set(events[:renamed]) == {
        beside,
        f"{beside}/weights",
        f"{beside}/weights/rank_0",
        f"{beside}/{STATE_FILE}",
    }
    assert events[renamed + 1 :] == ["sync "]  # the directory of the checkpoints, which holds the name


def test_each_learner_puts_its_own_files_on_the_disk_and_names_them(tmp_path: Path) -> None:
    write_as_learners_do(tmp_path)
    second = sync_files_of_rank(tmp_path, 1)
    assert sorted(second) == ["deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "random_state_1.pt"]
    assert second["random_state_1.pt"] == len("random_state_1.pt")
    assert sorted(sync_files_of_rank(tmp_path, 0)) == [
        "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed/mp_rank_00_model_states.pt",
        "latest",
        "random_state_0.pt",
        "zero_to_fp32.py",
        "zero_to_torch.py",
    ]


def test_files_that_the_driver_does_not_see_make_no_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner on another node has written to a disk of its own."""
    monkeypatch.setattr(checkpoints, "SEEN_S", 0.3)
    store.save(1, {"step": 1}, write_as_learners_do)

    def write_elsewhere(path: Path) -> dict[str, int]:
        return write_as_learners_do(path) | {"random_state_2.pt": 17}

    with pytest.raises(StorageNotShared, match=r"random_state_2\.pt is not in .*--checkpoint_state_dir"):
        store.save(2, {"step": 2}, write_elsewhere)
    assert store.newest() == Checkpoint(store.path(1), {"step": 1})


def test_a_checkpoint_of_another_format_is_refused_by_name_and_not_passed_over(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, {"step": step}, write_as_learners_do)
    state = store.path(2) / STATE_FILE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    with pytest.raises(NoWholeCheckpoint, match=r"step_000002 is of format 99, and this program reads 2"):
        store.newest()


def test_a_checkpoint_under_a_name_that_nobody_gives_is_told(store: CheckpointStore) -> None:
    """Else a run would start anew, and cut the rows of the one before."""
    store.save(160, {"step": 1}, write_as_learners_do)
    store.path(160).rename(store.path(160).with_name("step_160"))
    with pytest.raises(NoWholeCheckpoint, match="step_160 does not have the name of its checkpoint: step_000160"):
        store.newest()


@pytest.mark.parametrize("name", ["step_²", "step_00000a", "step_", "step_000002.old"])
def test_directories_of_other_names_are_no_checkpoints(store: CheckpointStore, name: str) -> None:
    store.save(1, {"step": 1}, write_as_learners_do)
    store.path(1).rename(store.path(1).with_name(name))
    assert store.steps() == []
    assert store.newest() is None


def test_what_could_not_be_written_whole_leaves_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    """On a full disk a half checkpoint would keep the room that the next one needs."""

    def fails(directory: Path) -> dict[str, int]:
        (directory / "large").write_bytes(bytes(1000))
        raise OSError(28, "No space left on device")

    store.save(1, {"step": 1}, write_as_learners_do)
    with pytest.raises(OSError, match="No space left"):
        store.save(2, {"step": 2}, fails)
    assert [path.name for path in store.path(1).parent.iterdir()] == ["step_000001"]
