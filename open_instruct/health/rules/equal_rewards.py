"""Every answer of a step gets the same reward, step after step."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD, column

STEPS = 5
ALIKE = 1e-6


@RULES.register(
    "equal_rewards",
    metrics=[REWARD, "all_groups/scores_standard_error"],
    fires_when=f"every group of {STEPS} steps has the same mean reward",
    cure="Read some answers, and see what the verifier or the reward function reads in them.",
    link=f"{PAGE}#a-run-of-zeros",
)
def equal_rewards(rows: Sequence[Row]) -> str | None:
    """Chance alone never gives groups with means that are the same to the last digit in five steps."""
    rows = rows[-STEPS:]
    rewards = column(rows, REWARD)
    alike = max(rewards) - min(rewards) <= ALIKE and max(column(rows, "all_groups/scores_standard_error")) <= ALIKE
    if len(rows) < STEPS or not alike:
        return None
    return f"the answers to every prompt of {STEPS} steps have the mean reward {rewards[-1]:.4g}"
