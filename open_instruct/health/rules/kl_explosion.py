"""The policy leaves the reference policy."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import median

STEPS = 20
MEDIAN_OVER = 5
FACTOR = 5
LEAST = 0.5
KL = "objective/kl2_avg"


@RULES.register(
    "kl_explosion",
    metrics=[KL],
    fires_when=f"the KL to the reference is above {LEAST} per token, and more than {FACTOR} times that of {STEPS} steps before",
    cure="Raise --beta, or lower --learning_rate.",
    link=f"{PAGE}#is-the-step-sound",
)
def kl_explosion(rows: Sequence[Row]) -> str | None:
    """Five times what it was twenty steps ago, and above half a nat per token."""
    rows = rows[-STEPS - MEDIAN_OVER :]
    before, after = median(rows[:MEDIAN_OVER], KL), median(rows[-MEDIAN_OVER:], KL)
    if len(rows) < 2 * MEDIAN_OVER or after <= max(FACTOR * before, LEAST):
        return None
    return f"the KL to the reference policy grew from {before:.2g} to {after:.2g} per token"
