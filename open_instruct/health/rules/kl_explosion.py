"""The policy leaves the reference policy."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column, median

STEPS = 20
MEDIAN_OVER = 5
FACTOR = 5
LEAST = 0.5
KL = "objective/kl2_avg"


@RULES.register(
    "kl_explosion",
    metrics=[KL],
    fires_when=f"the KL to the reference is above {LEAST} per token, as the median of {MEDIAN_OVER} steps, "
    f"and more than {FACTOR} times the lowest of the {STEPS} steps before",
    cure="Raise --beta, or lower --learning_rate.",
    link=f"{PAGE}#is-the-step-sound",
)
def kl_explosion(rows: Sequence[Row]) -> str | None:
    """A run begins at 0, so one that explodes in its first steps is seen after six."""
    older, newest = rows[-STEPS - MEDIAN_OVER : -MEDIAN_OVER], rows[-MEDIAN_OVER:]
    before, after = min(column(older, KL), default=float("inf")), median(newest, KL)
    if after <= max(FACTOR * before, LEAST):
        return None
    return f"the KL to the reference policy grew from {before:.2g} to {after:.2g} per token"
