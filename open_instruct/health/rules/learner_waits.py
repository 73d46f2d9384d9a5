"""Learners wait for data for more than half of the time."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column

STEPS = 20
SHARE = 0.5
LEAST_S = 1800.0


@RULES.register(
    "learner_waits",
    metrics=["time/trainer_waiting_for_data", "time/total", "num_steps_off_policy_max"],
    fires_when=f"learners wait for more than {SHARE:.0%} of {STEPS} steps, and for more than {LEAST_S / 60:.0f} minutes, "
    "in a run that generates ahead",
    cure="Give more of the machine to engines, shorten answers, or set --streaming or --async_steps 2.",
    link=f"{PAGE}#does-it-use-the-machine",
)
def learner_waits(rows: Sequence[Row]) -> str | None:
    """Only of runs that generate ahead, because others wait by design, and only if twenty steps lost half an hour."""
    rows = rows[-STEPS:]
    waited_s, seconds = sum(column(rows, "time/trainer_waiting_for_data")), sum(column(rows, "time/total"))
    is_ahead = max(column(rows, "num_steps_off_policy_max")) > 0
    if len(rows) < STEPS or waited_s <= max(SHARE * seconds, LEAST_S) or not is_ahead:
        return None
    return f"learners waited for data for {waited_s / seconds:.0%} of {STEPS} steps, {waited_s / 60:.0f} minutes"
