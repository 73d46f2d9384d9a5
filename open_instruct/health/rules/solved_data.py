"""Nearly every answer is right: the data teaches nothing more, or the verifier grants everything."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import mean

STEPS = 20
SHARE = 0.99


@RULES.register(
    "solved_data",
    metrics=["all_groups/percent_solved_mean"],
    fires_when=f"{SHARE:.0%} of the answers of {STEPS} steps are right, or more",
    cure="Read some answers: if they are right, take harder data or end the run; if not, the verifier is fooled.",
    link=f"{PAGE}#does-it-learn",
)
def solved_data(rows: Sequence[Row]) -> str | None:
    """A run that ends with 97 % of its training answers right has learned, and is no alarm."""
    rows = rows[-STEPS:]
    share = mean(rows, "all_groups/percent_solved_mean")
    if len(rows) < STEPS or share < SHARE:
        return None
    return f"{share:.1%} of the answers of {STEPS} steps got the highest score"
