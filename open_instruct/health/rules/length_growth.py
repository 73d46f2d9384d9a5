"""Answers grow fast and are not better for it."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD, mean, rises

STEPS = 20
MEAN_OVER = 5
FACTOR = 1.5


@RULES.register(
    "length_growth",
    metrics=["all_groups/val/sequence_lengths", REWARD],
    fires_when=f"answers grow to more than {FACTOR} times their length within {STEPS} steps, and the reward does not rise",
    cure="Set a price for length (--overlong_buffer_len), or divide the loss otherwise: --loss_fn dr_grpo.",
    link=f"{PAGE}#do-the-answers-stay-sane",
)
def length_growth(rows: Sequence[Row]) -> str | None:
    """Half as long again within twenty steps, as means over five, while the reward does not rise."""
    rows = rows[-STEPS - MEAN_OVER :]
    before = mean(rows[:MEAN_OVER], "all_groups/val/sequence_lengths")
    after = mean(rows[-MEAN_OVER:], "all_groups/val/sequence_lengths")
    if len(rows) < STEPS + MEAN_OVER or after <= FACTOR * before or rises(rows):
        return None
    return f"answers grew from {before:.0f} to {after:.0f} tokens within {STEPS} steps, and the reward did not rise"
