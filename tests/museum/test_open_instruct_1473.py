"""The log-probs of engine and learner drift apart, and the run goes on for hundreds of steps."""

from collections.abc import Callable

import pytest
from conftest import make_args
from exhibit import Exhibit

from open_instruct.cluster.failures import WeightsDiffer
from open_instruct.run.weight_agreement import DIFFERENCE, MismatchWatch

EXHIBIT = Exhibit(
    reports=("allenai/open-instruct #1473",),
    subject="engines and weights",
    happened="The difference between the engine's log-probs and the learner's grew from step to step, even with a learning"
    " rate of 0. The metric showed it, nothing acted on it, and some hundred steps later the run derailed and "
    "died of timeouts.",
    here="A step whose tokens the trained version sampled must have a difference within `--logprob_mismatch_limit`. "
    "The first step beyond it ends the run with both causes named, or logs an error each time "
    "(`run/weight_agreement.py`).",
)
DIFFERENCES = [1e-5, 2e-5, 5e-4, 5e-3, 5e-2, 0.5]
"""The largest difference of any token in float32, at steps 1, 2, …"""


def check(last_step: Callable[[list[float]], int]) -> None:
    """The weights were never the same again after step 3: step 4 is the last that may begin."""
    assert last_step(DIFFERENCES) == 4
    assert last_step(DIFFERENCES[:3]) == 3


def theirs(differences: list[float]) -> int:
    return len(differences)


def ours(differences: list[float]) -> int:
    watch = MismatchWatch(make_args())
    for step, difference in enumerate(differences, start=1):
        try:
            watch.check(step, {DIFFERENCE + "max": difference, "max_sample_age": 0, "kv_age/max": 0})
        except WeightsDiffer:
            return step
    return len(differences)


def test_drift_that_only_a_metric_shows_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_drift_ends_the_run_here() -> None:
    check(ours)
