"""Shows answers of groups that cannot be trained on, so that the user sees why: the answer, its label and its verifier's rule."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data_types import Sample
from open_instruct.scored_groups import ScoredGroup, last_samples
from open_instruct.system.counted import counted
from open_instruct.verifiers.registry import scoring_rule
from open_instruct.verifiers.row_verifiers import checks_of_row

ADVICE_WITHOUT_A_SCORE = (
    "Where no response scores, the cause is more often a verifier (the column `dataset`, --remap_verifier) or a form of the "
    "labels that does not fit the answers than data that are too hard."
)
LONGEST_TEXT = 300
"""Characters of a text that is shown whole. Of a longer text the beginning and the end are shown, because the answer is often at
the end."""

Answers = Callable[[Sequence[Sample]], Sequence[str]]
"""The texts that the verifiers get for some samples."""


def scores_in_words(rollouts: Sequence[ScoredGroup]) -> str:
    """How many responses each verifier scored above 0: `0 of 64 responses scored above 0 by re_search.` If there is none, advice
    follows."""
    above: defaultdict[str, int] = defaultdict(int)
    together: defaultdict[str, int] = defaultdict(int)
    for group in last_samples([rollout for rollout in rollouts if rollout.samples]):
        for part in group.by_verifier:
            above[part.name] += int((part.scores > 0).sum())
            together[part.name] += len(part.scores)
    shares = ", ".join(
        f"{above[name]:,} of {counted(number, 'response')} scored above 0 by {name}"
        for name, number in together.items()
    )
    return f"{shares}. {ADVICE_WITHOUT_A_SCORE}" if together and not any(above.values()) else f"{shares}."


def shown_answers(rollouts: Sequence[ScoredGroup], dataset: PromptDataset, answers: Answers) -> str:
    """Two answers of different rollouts with score, label and what the verifier looks for, each on lines of its own."""
    with_tokens = [rollout for rollout in last_samples(rollouts) if rollout.samples and not rollout.left_out_as]
    chosen = [*with_tokens[:1], *with_tokens[1:][-1:]]
    return "\n".join(_shown(rollout, dataset[rollout.result.index], answers) for rollout in chosen)


def _shown(rollout: ScoredGroup, row: PromptRow, answers: Answers) -> str:
    sample = rollout.samples[0]
    text = answers([sample])[0] if sample.is_judged else ""
    lines = [
        f"  {rollout.result.prompt_id}, {row.place}: score {rollout.scores[0]:.4g}, {sample.finish_reason}",
        f"    prompt  {readable(row.raw_query)}",
        f"    answer  {readable(text)}",
    ]
    for name, label in checks_of_row(row.dataset, row.ground_truth):
        lines += [f"    label   {readable(str(label))}", f"    rule    {name}: {readable(_rule(name, label))}"]
    return "\n".join(lines)


def _rule(name: str, label: object) -> str:
    try:
        return scoring_rule(name, label) or "its verifier does not say what it looks for"
    except Exception as error:  # a user's verifier may raise anything, and must not stop the run here
        return f"its verifier does not say what it looks for: {error!r}"


def readable(text: str) -> str:
    """A text on one line of bounded length: line ends, other control characters and half characters are shown as escapes."""
    if len(text) > LONGEST_TEXT:
        third = LONGEST_TEXT // 3
        text = f"{text[:third]} … ({len(text):,} characters) … {text[-2 * third :]}"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
