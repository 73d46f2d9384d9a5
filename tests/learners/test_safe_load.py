"""A checkpoint is data: what somebody has put into it is not run."""

import pickle
from pathlib import Path

import pytest
import torch

from open_instruct.learners.random_state import random_state, set_random_state
from open_instruct.learners.safe_load import data_only


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_nothing_that_stands_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    file, trace = tmp_path / "state.pt", tmp_path / "trace"
    torch.save({"weights": torch.ones(2), "optimizer": Attack(trace)}, file)
    with data_only(), pytest.raises(pickle.UnpicklingError, match="Unsupported"):
        torch.load(file, weights_only=False)  # as DeepSpeed asks
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists()  # else the test shows nothing


def test_a_random_state_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.save(random_state(), tmp_path / "random_state_0.pt")
    expected = torch.rand(4)
    with data_only():
        set_random_state(torch.load(tmp_path / "random_state_0.pt"))
    assert torch.equal(torch.rand(4), expected)


def test_what_deepspeed_writes_can_be_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    state = {"scaler": LossScaler(1.0), "stage": ZeroStageEnum(2), "at": fragment_address(3, 4)}
    torch.save(state, tmp_path / "state.pt")
    with data_only():
        loaded = torch.load(tmp_path / "state.pt")
    assert (loaded["stage"], loaded["at"]) == (ZeroStageEnum(2), fragment_address(3, 4))
