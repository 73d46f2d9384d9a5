"""The gradient is suddenly much larger than before."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import median

STEPS = 3
STEPS_BEFORE = 20
FACTOR = 10


@RULES.register(
    "gradient_jump",
    metrics=["optim/grad_norm"],
    fires_when=f"the norm of the gradient is more than {FACTOR} times that of the {STEPS_BEFORE} steps before, "
    f"as the median of {STEPS} steps",
    cure="Lower --learning_rate, or set --warmup_ratio 0.05.",
    link=f"{PAGE}#is-the-step-sound",
)
def gradient_jump(rows: Sequence[Row]) -> str | None:
    """The median of three steps against the median of the twenty before: single steps may jump."""
    newest, older = rows[-STEPS:], rows[-STEPS - STEPS_BEFORE : -STEPS]
    if len(older) < STEPS_BEFORE:
        return None
    before, after = median(older, "optim/grad_norm"), median(newest, "optim/grad_norm")
    if after <= FACTOR * before or before <= 0:
        return None
    return f"the norm of the gradient grew from {before:.3g} to {after:.3g}"
