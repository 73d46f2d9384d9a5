"""Engine and learner disagree about the same tokens, at once or more and more."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column, median

STEPS = 10
FACTOR = 3
LEAST = 0.05
MOST = 0.5
DIFFERENCE = "debug/vllm_vs_local_logprob_diff_mean"


@RULES.register(
    "logprob_drift",
    metrics=[DIFFERENCE],
    fires_when=f"log-probs of engine and learner differ by more than {MOST} in two steps in a row, "
    f"or by more than {LEAST} and {FACTOR} times as much as at first, as medians of {STEPS} steps",
    cure="Set --async_steps 0: if the difference stays, the engine has wrong weights; else lower --learning_rate.",
    link=f"{PAGE}#is-the-step-sound",
)
def logprob_drift(rows: Sequence[Row]) -> str | None:
    """Half a nat in two steps in a row; or three times that of the first ten steps in sight, and more than one step explains."""
    now = min(column(rows[-2:], DIFFERENCE))
    before, after = median(rows[:STEPS], DIFFERENCE), median(rows[-STEPS:], DIFFERENCE)
    if len(rows) >= 2 * STEPS and after > max(FACTOR * before, LEAST):
        return f"log-probs of engine and learner differ by {after:.2g} on average, {before:.2g} at first"
    has_jumped = len(rows) > 1 and now > MOST
    return f"log-probs of engine and learner differ by {now:.2g} on average in two steps" if has_jumped else None
