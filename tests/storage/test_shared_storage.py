"""Directories that all nodes share, or do not. A run on two nodes with disks of their own is in test_several_nodes.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.run import storage_check
from open_instruct.storage import shared_storage
from open_instruct.storage.checkpoints import StorageNotShared


def test_shared_storage_is_found_to_be_shared_and_left_clean(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    with shared_storage.probe(directory) as path:
        shared_storage.judge(path, {node: shared_storage.answer(str(path), node) for node in ("10.0.0.2", "10.0.0.3")})
    assert list(directory.iterdir()) == []


def test_a_node_that_does_not_see_the_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "SEEN_S", 0.3)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    with shared_storage.probe(ours) as path:
        answers = {
            "10.0.0.2": shared_storage.answer(str(path), "10.0.0.2"),
            "10.0.0.3": shared_storage.answer(str(theirs / path.name), "10.0.0.3"),
        }
        with pytest.raises(
            StorageNotShared, match=f"{ours} on the driver's node is not the same directory as on 10.0.0.3, "
        ):
            shared_storage.judge(path, answers)
    assert list(ours.iterdir()) == list(theirs.iterdir()) == []


def test_a_node_whose_files_are_not_seen_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees a copy of what the driver writes, and writes to that."""
    monkeypatch.setattr(shared_storage, "SEEN_S", 0.3)
    with shared_storage.probe(tmp_path / "ours") as path:
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        copy.touch()
        answers = {"10.0.0.2": shared_storage.answer(str(copy), "10.0.0.2")}
        assert answers == {"10.0.0.2": True}
        with pytest.raises(StorageNotShared, match=r"10\.0\.0\.2"):
            shared_storage.judge(path, answers)


def test_learners_nodes_are_asked_for_every_directory(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one node that there is here answers, as one of learners, to a driver that takes itself to be elsewhere."""
    home = ray_session.get_runtime_context().get_node_id()
    elsewhere = SimpleNamespace(get_node_id=lambda: "another node")
    monkeypatch.setattr(storage_check.ray, "get_runtime_context", lambda: elsewhere)
    judged: list[tuple[Path, dict[str, bool]]] = []
    monkeypatch.setattr(shared_storage, "judge", lambda path, answers: judged.append((path.parent, answers)))
    storage_check.check_storage([tmp_path / "state", tmp_path / "out"], [home])
    [address] = {address for _, answers in judged for address in answers}
    assert judged == [(tmp_path / "state", {address: True}), (tmp_path / "out", {address: True})]
