"""Engines have nothing to do for more than half of the time."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column

STEPS = 20
SHARE = 0.5
LEAST_S = 1800.0


@RULES.register(
    "idle_engines",
    metrics=["engines/busy_share", "time/total", "num_steps_off_policy_max"],
    fires_when=f"engines idle for more than {SHARE:.0%} of {STEPS} steps, and for more than {LEAST_S / 60:.0f} minutes, "
    "in a run that generates ahead",
    cure="Give more of the machine to learners, raise --pack_length, or set --compile_model on a GPU.",
    link=f"{PAGE}#does-it-use-the-machine",
)
def idle_engines(rows: Sequence[Row]) -> str | None:
    """Only of runs that generate ahead, because others idle by design, and only if twenty steps lost half an hour."""
    rows = rows[-STEPS:]
    seconds = sum(column(rows, "time/total"))
    idle_s = sum((1 - row["engines/busy_share"]) * row["time/total"] for row in rows)
    is_ahead = max(column(rows, "num_steps_off_policy_max")) > 0
    if len(rows) < STEPS or idle_s <= max(SHARE * seconds, LEAST_S) or not is_ahead:
        return None
    return f"engines idled for {idle_s / seconds:.0%} of {STEPS} steps, {idle_s / 60:.0f} minutes"
