"""Held-out answers get worse while training answers get better."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD

FALL = 0.1
ERRORS = 2


@RULES.register(
    "evaluation_fall",
    metrics=["eval/scores", REWARD, "all_groups/scores_standard_error"],
    fires_when=f"two evaluations are {FALL:.0%} below the best one, and training rose by {ERRORS} standard errors since",
    cure="Read transcripts/: the reward may be fooled, or the data learned by heart. Take more data, or a higher --beta.",
    link=f"{PAGE}#does-it-learn",
)
def evaluation_fall(rows: Sequence[Row]) -> str | None:
    """The last two evaluations are both a tenth below the best one, and the reward is above that of its step."""
    if len(rows) < 3:
        return None
    best = max(rows[:-2], key=lambda row: row["eval/scores"])
    highest = max(row["eval/scores"] for row in rows[-2:])
    error = sum(row["all_groups/scores_standard_error"] ** 2 for row in (best, rows[-1])) ** 0.5
    has_risen = rows[-1][REWARD] - best[REWARD] > ERRORS * error
    if best["eval/scores"] <= 0 or highest > (1 - FALL) * best["eval/scores"] or not has_risen:
        return None
    fall = f"eval/scores fell from {best['eval/scores']:.3g} to {rows[-1]['eval/scores']:.3g}"
    return f"{fall} while the reward of training rose from {best[REWARD]:.3g} to {rows[-1][REWARD]:.3g}"
