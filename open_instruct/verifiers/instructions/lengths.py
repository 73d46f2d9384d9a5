"""Instructions on how long a response is, and on its sentences and paragraphs."""

import re

from open_instruct.verifiers.instructions.instruction import (
    Instruction,
    compare,
    count,
    instruction,
    position,
    relation,
    word,
)
from open_instruct.verifiers.instructions.parts import (
    bare,
    parts_between,
    sentences,
    words_and_marks,
    words_of,
)


def _number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    return compare(len(sentences(response)), relation, num_sentences)


def _number_words(response: str, num_words: int, relation: str) -> bool:
    """As in IFEval, `don't` counts as two words here."""
    return compare(len(re.findall(r"\w+", response)), relation, num_words)


def _number_paragraphs(response: str, num_paragraphs: int = 2) -> bool:
    """Paragraphs are the parts between dividers `***`."""
    paragraphs = parts_between(response, "***")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def _two_paragraphs(response: str) -> bool:
    """Paragraphs are the parts between blank lines."""
    paragraphs = parts_between(response, "\n\n")
    return paragraphs is not None and len(paragraphs) == 2


def _nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """As in IFEval, blank paragraphs do not count, but the nth must not be blank."""
    paragraphs = response.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    start = paragraphs[nth_paragraph - 1].split(None, 1)[:1]
    return bool(start) and re.split(r"[.,?!'\"]", start[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def _composition(response: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs of `n_sent` sentences of `n_words` words, where marks may count as words or not."""
    paragraphs = parts_between(response, "* * *") or []
    parts = [sentences(paragraph) for paragraph in paragraphs]
    return len(parts) == 3 and all(
        len(part) == n_sent
        and all(n_words in (len(words_of(sentence)), len(words_and_marks(sentence))) for sentence in part)
        for part in parts
    )


def _first_word_of_sentences(response: str, first_word: str) -> bool:
    return all(bare(sentence.split()[0]) == bare(first_word) for sentence in sentences(response))


def _last_word_of_sentences(response: str, last_word: str) -> bool:
    return all(bare(sentence.split()[-1]) == bare(last_word) for sentence in sentences(response))


def _first_word(response: str, first_word: str) -> bool:
    return [bare(token) for token in response.split(None, 1)[:1]] == [bare(first_word)]


def _last_word(response: str, last_word: str) -> bool:
    return [bare(token) for token in response.rsplit(None, 1)[-1:]] == [bare(last_word)]


INSTRUCTIONS: dict[str, Instruction] = {
    "length_constraints:number_sentences": instruction(_number_sentences, num_sentences=count, relation=relation),
    "length_constraints:number_words": instruction(_number_words, num_words=count, relation=relation),
    "length_constraints:number_paragraphs": instruction(_number_paragraphs, num_paragraphs=count),
    "length_constraints:nth_paragraph_first_word": instruction(
        _nth_paragraph_first_word, num_paragraphs=count, nth_paragraph=position, first_word=word
    ),
    "paragraphs:paragraphs": instruction(_number_paragraphs),
    "paragraphs:paragraphs2": instruction(_two_paragraphs),
    "count:counting_composition": instruction(_composition, n_sent=count, n_words=count),
    "first_word:first_word_sent": instruction(_first_word_of_sentences, first_word=word),
    "first_word:first_word_answer": instruction(_first_word, first_word=word),
    "last_word:last_word_sent": instruction(_last_word_of_sentences, last_word=word),
    "last_word:last_word_answer": instruction(_last_word, last_word=word),
}
