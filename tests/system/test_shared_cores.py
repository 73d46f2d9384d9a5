"""Processes that compute divide the cores of their machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from open_instruct.system import shared_cores
from open_instruct.system.shared_cores import CorePlace, SharedCores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_cores, "num_cores", lambda: 8)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_of(cores: SharedCores) -> int:
    """Threads that this process has when it computes the next piece of its work."""
    cores.compute()
    return torch.get_num_threads()


def test_a_process_that_computes_alone_has_all_cores(tmp_path: Path) -> None:
    learner, engine = (SharedCores(tmp_path / "cores", CorePlace(number)) for number in (0, 1))
    assert threads_of(learner) == 8
    assert threads_of(engine) == 4  # both compute
    assert threads_of(learner) == 4
    engine.rest()
    assert threads_of(learner) == 8


def test_learner_computes_until_its_work_is_over_or_fails(tmp_path: Path) -> None:
    learner, engine = (SharedCores(tmp_path / "cores", CorePlace(number)) for number in (0, 1))

    def fail() -> None:
        with learner.computing():
            assert threads_of(engine) == 4
            raise ValueError("a batch")

    with pytest.raises(ValueError, match="a batch"):
        fail()
    assert threads_of(engine) == 8


def test_engine_with_workers_of_its_own_counts_as_many(tmp_path: Path) -> None:
    learner, engine = SharedCores(tmp_path / "cores"), SharedCores(tmp_path / "cores", CorePlace(1, num_workers=3))
    engine.compute()
    assert threads_of(learner) == 2


def test_more_processes_than_cores_have_a_thread_each(tmp_path: Path) -> None:
    shares = [SharedCores(tmp_path / "cores", CorePlace(number)) for number in range(9)]
    assert [threads_of(cores) for cores in shares][-1] == 1


def test_replacement_of_a_process_that_died_while_it_computed_begins_at_rest(tmp_path: Path) -> None:
    learner, dead = (SharedCores(tmp_path / "cores", CorePlace(number)) for number in (0, 1))
    dead.compute()
    SharedCores(tmp_path / "cores", CorePlace(1))
    assert threads_of(learner) == 8


def test_without_a_file_threads_stay_as_they_are() -> None:
    torch.set_num_threads(3)
    alone = SharedCores()
    with alone.computing():
        assert threads_of(alone) == 3
