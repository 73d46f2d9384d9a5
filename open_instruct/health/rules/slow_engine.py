"""One engine generates much more slowly than the others."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row

SHARE = 0.5


@RULES.register(
    "slow_engine",
    metrics=["engines/slowest_share"],
    fires_when=f"an engine makes less than {SHARE:.0%} of the tokens per second of the median engine, over 20 steps",
    cure="Look for another program on its device, a device that is too hot, or a slow node.",
    link=f"{PAGE}#does-it-use-the-machine",
)
def slow_engine(rows: Sequence[Row]) -> str | None:
    """The metric is over twenty steps, so a single slow answer is no alarm."""
    share = rows[-1]["engines/slowest_share"]
    if share >= SHARE:
        return None
    return f"the slowest engine makes {share:.0%} of the tokens per second of the median engine"
