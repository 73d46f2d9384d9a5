"""Why no group of a step can be trained on: the likeliest causes by what the responses show, each with its cure. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from open_instruct.data_types import Sample
from open_instruct.rollouts.evaluation_metrics import SOLVED
from open_instruct.scored_groups import Reading, ScoredGroup, last_samples
from open_instruct.system.counted import counted

MOST = 0.5
"""A cause is named if at least this share of the responses shows it."""
SHORTEST_LABEL = 2
"""Characters of a label that is looked for in responses; a single digit stands in any of them by chance."""
OTHER_VERIFIER = (
    "choose the verifier that reads the form which the model writes (the column `dataset`, --remap_verifier)"
)
ADVICE_WITHOUT_A_SCORE = (
    "Where no response scores, the cause is more often a verifier (the column `dataset`, --remap_verifier) or a form of the "
    "labels that does not fit the answers than data that are too hard."
)


@dataclass(frozen=True)
class Response:
    """A response with what is known of it."""

    sample: Sample
    score: float
    """The verifiers', or the reward of its environment where that is higher: either may say that a response is right."""
    text: str
    """The text that the verifiers got."""
    full_text: str
    """The same with special tokens."""
    answers: tuple[str, ...]
    """The right answers of its row."""
    readings: tuple[tuple[str, Reading], ...]
    """What each verifier says of it, by the verifier's name."""


@dataclass(frozen=True)
class Texts:
    """How texts are found."""

    of_verifiers: Callable[[Sequence[Sample]], Sequence[str]]
    """The texts that the verifiers get for some samples."""
    whole: Callable[[list[int]], str]
    """Tokens as text, with special tokens."""
    answers_of: Callable[[int], tuple[str, ...]]
    """The right answers of a row."""


def scores_in_words(rollouts: Sequence[ScoredGroup]) -> str:
    """How many responses each verifier scored above 0: `0 of 64 responses scored above 0 by re_search.`"""
    above: defaultdict[str, int] = defaultdict(int)
    together: defaultdict[str, int] = defaultdict(int)
    for group in last_samples([rollout for rollout in rollouts if rollout.samples]):
        scores_by = {part.name: part.scores for part in group.by_verifier}
        for name, scores in (scores_by | {function.name: function.rewards for function in group.functions}).items():
            above[name] += int((scores > 0).sum())
            together[name] += len(scores)
    shares = ", ".join(
        f"{above[name]:,} of {counted(number, 'response')} scored above 0 by {name}"
        for name, number in together.items()
    )
    return f"{shares}."


def responses_of(rollouts: Sequence[ScoredGroup], texts: Texts) -> list[Response]:
    """The responses of rollouts that have tokens and are seen by verifiers; of a conversation the last sample."""
    responses = []
    for group in last_samples([rollout for rollout in rollouts if rollout.samples and not rollout.left_out_as]):
        names = [part.name for part in group.by_verifier]
        rewards_of_environments = group.environment_rewards
        answers = texts.answers_of(group.result.index)
        for position, sample in enumerate(group.samples):
            if sample.is_judged:
                readings = [verifier_readings[position] for verifier_readings in group.readings]
                responses.append(
                    Response(
                        sample,
                        float(max(group.outcomes[position], rewards_of_environments[position])),
                        texts.of_verifiers([sample])[0],
                        texts.whole(sample.answer_ids.tolist()),
                        answers,
                        tuple(zip(names, readings, strict=False)),
                    )
                )
    return responses


def likely_causes(rollouts: Sequence[ScoredGroup], texts: Texts) -> str:
    """Sentences about the likeliest causes, the likeliest first; "" if there are no responses."""
    responses = responses_of(rollouts, texts)
    if not responses:
        return ""
    if not any(group.by_verifier for group in rollouts):  # reward functions do not say what is right
        return " ".join(_causes_of_equal_scores(rollouts, responses))
    if all(response.score >= SOLVED for response in responses):
        return "Every response is right, so these prompts teach nothing any more: take harder data."
    if any(response.score > 0 for response in responses):
        return " ".join(_causes_of_equal_scores(rollouts, responses))
    return " ".join(_causes_of_zeros(responses)) or ADVICE_WITHOUT_A_SCORE


def _causes_of_equal_scores(rollouts: Sequence[ScoredGroup], responses: Sequence[Response]) -> Iterator[str]:
    groups = [rollout for rollout in rollouts if len(rollout.samples) > 1 and not rollout.left_out_as]
    num_same = sum(len({sample.response_ids.tobytes() for sample in group.samples}) == 1 for group in groups)
    if groups and num_same >= MOST * len(groups):
        yield f"In {num_same} of {len(groups)} groups all responses are the same text: a higher --temperature makes them differ."
    yield from _cut_off(responses)
    yield (
        "Each prompt is too hard or too easy for the model as it is: data between them, or more responses to each prompt "
        "(--num_samples_per_prompt_rollout), would show a difference."
    )


def _causes_of_zeros(responses: Sequence[Response]) -> Iterator[str]:
    yield from _cut_off(responses)
    yield from _special_tokens(responses)
    for name in dict.fromkeys(name for response in responses for name, _ in response.readings):
        yield from _readings_of(name, responses)


def _cut_off(responses: Sequence[Response]) -> Iterator[str]:
    cut = [response for response in responses if response.sample.finish_reason == "length"]
    if len(cut) >= MOST * len(responses):
        longest = max(len(response.sample.response_ids) for response in cut)
        yield (
            f"{len(cut)} of {len(responses)} responses were cut off, after {longest} tokens: raise --response_length, or ask for "
            "short answers in the prompt."
        )


def _special_tokens(responses: Sequence[Response]) -> Iterator[str]:
    """A right answer that the verifiers do not see, because it stands in special tokens, which are left out of their text."""
    hidden = [
        response
        for response in responses
        if _holds_label(response.full_text, response) and not _holds_label(response.text, response)
    ]
    if len(hidden) >= MOST * len(responses):
        yield (
            f"{len(hidden)} of {len(responses)} responses hold the label in special tokens, which verifiers do not see: a "
            "verifier names those that it reads in `tags`."
        )


def _readings_of(name: str, responses: Sequence[Response]) -> Iterator[str]:
    readings = [
        (response, reading) for response in responses for verifier, reading in response.readings if verifier == name
    ]
    nothing_read = [(response, reading) for response, reading in readings if reading.answer == ""]
    num_elsewhere = sum(_holds_label(response.text, response) for response, _ in readings)
    elsewhere = f" The label stands somewhere in {num_elsewhere} of them." if num_elsewhere else ""
    if nothing_read and len(nothing_read) >= MOST * len(readings):
        reason = Counter(reading.reasoning for _, reading in nothing_read).most_common(1)[0][0]
        yield (
            f"{name} found no answer in {len(nothing_read)} of {len(readings)} responses ({reason}).{elsewhere} Ask for this "
            f"form in the prompt (--system_prompt_override_file), or {OTHER_VERIFIER}."
        )
        return
    answers = [(response, reading.answer) for response, reading in readings if reading.answer]
    if len(answers) >= MOST * len(readings):
        response, answer = answers[0]
        label = f", such as {answer!r:.60} for {response.answers[0]!r:.60}" if response.answers else ""
        yield (
            f"{name} read an answer in {len(answers)} of {len(readings)} responses, and none equals its label{label}.{elsewhere} "
            "Compare the forms of answers and labels (--ground_truths_key). If they agree, the data are too "
            "hard."
        )


def _holds_label(text: str, response: Response) -> bool:
    return any(len(answer) >= SHORTEST_LABEL and answer in text for answer in response.answers)
