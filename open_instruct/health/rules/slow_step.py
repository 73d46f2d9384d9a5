"""A step took far longer than the steps before it."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import median

STEPS_BEFORE = 20
LEAST_BEFORE = 5
FACTOR = 6
LEAST_S = 600.0
PARTS = "trainer_waiting_for_data", "learners", "weight_sync", "saving", "waiting_for_evaluation"


@RULES.register(
    "slow_step",
    metrics=["time/total"],
    fires_when=f"a step takes more than {FACTOR} times the median of the {STEPS_BEFORE} steps before, "
    f"and more than {LEAST_S / 60:.0f} minutes",
    cure="See what the log says of these minutes: an engine, a verifier or a disk may have hung.",
    link=f"{PAGE}#does-it-use-the-machine",
)
def slow_step(rows: Sequence[Row]) -> str | None:
    """Six times the median of the steps before, and more than ten minutes."""
    older, seconds = rows[-1 - STEPS_BEFORE : -1], rows[-1]["time/total"]
    if len(older) < LEAST_BEFORE or seconds <= max(FACTOR * median(older, "time/total"), LEAST_S):
        return None
    part = max((f"time/{name}" for name in PARTS), key=lambda name: rows[-1].get(name, 0.0))
    before = median(older, "time/total") / 60
    return f"the step took {seconds / 60:.0f} minutes, most of them {part}; the steps before took {before:.1f}"
