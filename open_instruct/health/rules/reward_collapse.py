"""The reward has fallen to less than half of what it was."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD, mean

STEPS = 10
SHARE = 0.5
ERRORS = 5
ERROR = "all_groups/scores_standard_error"


@RULES.register(
    "reward_collapse",
    metrics=[REWARD, ERROR],
    fires_when=f"the mean reward of {STEPS} steps is below {SHARE:.0%} of the best {STEPS} before, "
    f"and {ERRORS} standard errors below them or more",
    cure="Go on from the checkpoint before the fall with a lower --learning_rate, or with --beta.",
    link=f"{PAGE}#does-it-learn",
)
def reward_collapse(rows: Sequence[Row]) -> str | None:
    """Of ten steps against the best ten before, where the fall is also five standard errors of a single step or more."""
    newest, older = rows[-STEPS:], rows[:-STEPS]
    bests = [mean(older[end - STEPS : end], REWARD) for end in range(STEPS, len(older) + 1)]
    best, reward = max(bests, default=0.0), mean(newest, REWARD)
    if best <= 0 or reward >= SHARE * best or best - reward < ERRORS * mean(older[-STEPS:], ERROR):
        return None
    return f"the mean reward of {STEPS} steps fell from {best:.3g} to {reward:.3g}"
