"""Many answers reach the limit of their length before they end."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column, mean, rises

STEPS = 10
LEAST = 0.75


@RULES.register(
    "cut_off_answers",
    metrics=["all_groups/val/stop_rate"],
    fires_when=f"all_groups/val/stop_rate is below {LEAST} in each of {STEPS} steps, and does not rise",
    cure="Raise --response_length, or set a price for length: --overlong_buffer_len or --non_stop_penalty.",
    link=f"{PAGE}#do-the-answers-stay-sane",
)
def cut_off_answers(rows: Sequence[Row]) -> str | None:
    """In each of ten steps. A model that learns to stop begins below the limit, so a rising share is no alarm."""
    rows = rows[-STEPS:]
    most = max(column(rows, "all_groups/val/stop_rate"))
    if len(rows) < STEPS or most >= LEAST or rises(rows, "all_groups/val/stop_rate"):
        return None
    return f"{1 - mean(rows, 'all_groups/val/stop_rate'):.0%} of the answers of {STEPS} steps are cut off"
