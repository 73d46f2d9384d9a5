"""Instructions to repeat something: the request, a part of it, or a phrase; and to answer twice."""

from collections.abc import Iterator

from open_instruct.verifiers.instructions.instruction import Instruction, count, instruction, position, text, word
from open_instruct.verifiers.instructions.parts import parts_between

SEPARATOR = "******"


def same(response: str, prompt: str) -> bool:
    """Whether two texts are equal, apart from case and surrounding space."""
    return response.strip().lower() == prompt.strip().lower()


def _copy(response: str, prompt_to_repeat: str) -> bool:
    return same(response, prompt_to_repeat)


def _copies(response: str, prompt_to_repeat: str, N: int) -> bool:
    copies = response.split(SEPARATOR)
    return len(copies) == N and all(same(copy, prompt_to_repeat) for copy in copies)


def _repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """By the prompt the character at `n_end` belongs to the span, but open-instruct's check leaves it out. Both are accepted."""
    return any(same(response, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


def _two_responses(response: str) -> bool:
    answers = parts_between(response, SEPARATOR)
    return answers is not None and len(answers) == 2 and answers[0].strip() != answers[1].strip()


def _repeat_phrase(response: str, phrase: str, small_n: int) -> bool:
    """The phrase occurs `small_n` times, each time with one of its inner words replaced."""
    target = phrase.split()
    phrases = [candidate.split() for candidate in _phrases_from(response, target[0], target[-1])]
    return len(phrases) == small_n and all(
        len(candidate) == len(target) and sum(a != b for a, b in zip(candidate, target, strict=True)) == 1
        for candidate in phrases
    )


def _phrases_from(response: str, first: str, last: str) -> Iterator[str]:
    """Phrases within a line that begin with the word `first` and end with the next word `last`."""
    for line in response.splitlines():
        start = line.find(f"{first} ")
        while start >= 0:
            end = line.find(f" {last}", start + len(first) + 1)
            if end < 0:
                break
            end += len(last) + 1
            yield line[start:end]
            start = line.find(f"{first} ", end)


INSTRUCTIONS: dict[str, Instruction] = {
    "combination:two_responses": instruction(_two_responses),
    "combination:repeat_prompt": instruction(_repeat_prompt, prompt_to_repeat=text),
    "copy:repeat_phrase": instruction(_repeat_phrase, phrase=word, small_n=count),
    "copy:copy": instruction(_copy, prompt_to_repeat=text),
    "copy:copying_simple": instruction(_copy, prompt_to_repeat=text),
    "copy:copying_multiple": instruction(_copies, prompt_to_repeat=text, N=position),
    "new:copy_span_idx": instruction(_span, prompt_to_repeat=text, n_start=count, n_end=count),
}
