"""More than a few answers get no score."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import column

STEPS = 10
LEAST_STEPS = 3
SHARE = 0.02
PROMPTS = "all_groups/total_prompts", "batch/total_prompts", "real_batch_size_ratio"


@RULES.register(
    "unscored_answers",
    metrics=["objective/not_scored", "episode", *PROMPTS],
    fires_when=f"more than {SHARE:.0%} of the answers of up to {STEPS} steps are not scored, and of {LEAST_STEPS} at least",
    cure="The log says why, once a minute: a verifier is too slow (--verifier_timeout_s) or raises errors.",
    link=f"{PAGE}#does-it-learn",
)
def unscored_answers(rows: Sequence[Row]) -> str | None:
    """The answers to a prompt are those of a step (`episode` / steps) divided by its prompts."""
    rows, last = rows[-STEPS:], rows[-1]
    num_answers = (
        last["episode"] / last["training_step"] * last["real_batch_size_ratio"] / max(1, last["batch/total_prompts"])
    )
    unscored = sum(column(rows, "objective/not_scored"))
    share = unscored / max(1.0, unscored, num_answers * sum(column(rows, "all_groups/total_prompts")))
    enough = len(rows) >= LEAST_STEPS and share > SHARE
    return f"{share:.1%} of the answers of {len(rows)} steps were not scored" if enough else None
