"""Many groups become too old before a step takes them."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column

STEPS = 10
SHARE = 0.1


@RULES.register(
    "stale_groups",
    metrics=["stale_results_dropped", "all_groups/total_prompts"],
    fires_when=f"more than {SHARE:.0%} of the groups of {STEPS} steps are thrown away for their age",
    cure="Raise --max_staleness_allowed, or lower --async_steps, so that fewer answers are begun ahead.",
    link=f"{PAGE}#is-the-step-sound",
)
def stale_groups(rows: Sequence[Row]) -> str | None:
    """A run that is always one step ahead is always at its bound, so the age itself is no alarm."""
    rows = rows[-STEPS:]
    dropped = sum(column(rows, "stale_results_dropped"))
    share = dropped / max(1.0, dropped + sum(column(rows, "all_groups/total_prompts")))
    if len(rows) < STEPS or share <= SHARE:
        return None
    return f"{share:.0%} of the groups of {STEPS} steps were thrown away because they were too old"
