"""All answers of most groups have the same reward, which is neither that of a wrong answer nor that of a right one."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row
from open_instruct.health.series import ratio

STEPS = 10
SHARE = 0.5


@RULES.register(
    "equal_groups",
    metrics=["batch/filtered_prompts_nonzero", "all_groups/total_prompts"],
    fires_when=f"in more than {SHARE:.0%} of the groups of {STEPS} steps all answers have the same reward, neither 0 nor 1",
    cure="Give rewards that tell the answers to one prompt apart: in finer grades, or by another verifier.",
    link=f"{PAGE}#does-it-learn",
)
def equal_groups(rows: Sequence[Row]) -> str | None:
    """Groups that are all wrong or all right do not count: `hopeless_groups` and `solved_data` look at them."""
    rows = rows[-STEPS:]
    share = ratio(rows, "batch/filtered_prompts_nonzero", "all_groups/total_prompts")
    if len(rows) < STEPS or share <= SHARE:
        return None
    return f"in {share:.0%} of the groups of {STEPS} steps all answers have the same reward, neither 0 nor 1"
