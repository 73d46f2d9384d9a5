"""The correction between engine and learner caps many tokens."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import mean

STEPS = 10
SHARE = 0.01


@RULES.register(
    "capped_weights",
    metrics=["val/rho_clipfrac"],
    fires_when=f"val/rho_clipfrac is above {SHARE:.0%} on average over {STEPS} steps",
    cure="Lower --async_steps or --learning_rate.",
    link=f"{PAGE}#is-the-step-sound",
)
def capped_weights(rows: Sequence[Row]) -> str | None:
    """The engine sampled with a policy that is no longer near the one that is trained."""
    rows = rows[-STEPS:]
    share = mean(rows, "val/rho_clipfrac")
    if len(rows) < STEPS or share <= SHARE:
        return None
    return f"the importance weights of {share:.1%} of the tokens of {STEPS} steps were capped"
