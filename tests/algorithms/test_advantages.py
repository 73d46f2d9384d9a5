"""Advantages within a group."""

import numpy as np
import pytest

from open_instruct.algorithms.advantages import ADVANTAGES, group_advantages
from open_instruct.registry import UnknownName


def test_centered_and_standard_advantages() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 2.0])
    centered = group_advantages(rewards, "centered")
    assert centered.dtype == np.float32
    np.testing.assert_array_equal(centered, [-1, 0, 0, 1])
    np.testing.assert_allclose(group_advantages(rewards, "standard"), np.array([-1, 0, 0, 1]) / np.sqrt(0.5), rtol=1e-6)
    for name in ("centered", "standard"):
        np.testing.assert_array_equal(group_advantages(np.full(4, 5.0), name), 0)


def test_advantages_of_an_unknown_name_are_refused() -> None:
    with pytest.raises(UnknownName, match="no advantage called 'zscore'; there are: centered, standard"):
        group_advantages(np.zeros(2), "zscore")


@pytest.mark.parametrize("wrong", [np.zeros(3), np.array([np.nan, 0.0]), np.zeros((2, 1))])
def test_advantages_that_are_no_number_for_each_response_are_refused(
    wrong: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ADVANTAGES, "_entries", dict(ADVANTAGES._entries))
    ADVANTAGES.register("wrong")(lambda rewards, options: wrong)
    with pytest.raises(ValueError, match="must give one finite number for each"):
        group_advantages(np.array([0.0, 1.0]), "wrong")
