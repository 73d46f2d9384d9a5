"""The model becomes certain fast and is not better for it."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD, mean, rises

STEPS = 20
MEAN_OVER = 5
SHARE = 0.5
SOLVED = 0.9


@RULES.register(
    "entropy_collapse",
    metrics=["policy/entropy_avg", REWARD],
    fires_when=f"the entropy falls to less than {SHARE:.0%} of itself within {STEPS} steps, the reward is not higher, "
    f"and at most {SOLVED:.0%} of the answers are right",
    cure="Lower --learning_rate, raise --clip_higher or --beta, or set --entropy_coef.",
    link=f"{PAGE}#do-the-answers-stay-sane",
)
def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """Half within twenty steps while the reward is no higher. Who is right in nine of ten answers may be certain."""
    rows = rows[-STEPS - MEAN_OVER :]
    is_solved = rows[-1].get("all_groups/percent_solved_mean", 0.0) > SOLVED
    before, after = mean(rows[:MEAN_OVER], "policy/entropy_avg"), mean(rows[-MEAN_OVER:], "policy/entropy_avg")
    is_better = rises(rows) or mean(rows[-MEAN_OVER:], REWARD) > mean(rows[:MEAN_OVER], REWARD)
    if len(rows) < STEPS + MEAN_OVER or after >= SHARE * before or is_solved or is_better:
        return None
    return f"the entropy fell from {before:.3g} to {after:.3g} within {STEPS} steps, and the reward is not higher"
