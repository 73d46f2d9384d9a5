"""No answer of most groups is right, and the reward does not rise."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import REWARD, ratio, rises

STEPS = 20
SHARE = 0.5


@RULES.register(
    "hopeless_groups",
    metrics=["batch/filtered_prompts_zero", "all_groups/total_prompts", REWARD],
    fires_when=f"more than {SHARE:.0%} of the groups of {STEPS} steps have only wrong answers, and the reward does not rise",
    cure="See whether verifier, labels and format fit; then take easier data, or raise --num_samples_per_prompt_rollout.",
    link=f"{PAGE}#a-run-of-zeros",
)
def hopeless_groups(rows: Sequence[Row]) -> str | None:
    """SmolLM2 begins with three quarters of such groups and learns fast, so a rising reward is no alarm."""
    rows = rows[-STEPS:]
    share = ratio(rows, "batch/filtered_prompts_zero", "all_groups/total_prompts")
    if len(rows) < STEPS or share <= SHARE or rises(rows):
        return None
    return f"{share:.0%} of the groups of {STEPS} steps have only wrong answers, and the reward does not rise"
