"""A gradient was not finite, so its step changed no weights."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row


@RULES.register(
    "nonfinite_steps",
    metrics=["optim/nonfinite_steps"],
    fires_when="optim/nonfinite_steps is above 0",
    cure="Lower --learning_rate, or set --warmup_ratio 0.05.",
    link=f"{PAGE}#is-the-step-sound",
)
def nonfinite_steps(rows: Sequence[Row]) -> str | None:
    """The first is told: the run ends by itself after --max_nonfinite_steps in a row."""
    number = rows[-1]["optim/nonfinite_steps"]
    return f"{number:.0f} optimizer steps were left out, because their gradient was not finite" if number > 0 else None
