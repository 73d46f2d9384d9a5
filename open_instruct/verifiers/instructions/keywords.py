"""Instructions on words and letters that a response must or must not hold."""

import itertools
import re
from collections import Counter

from open_instruct.verifiers.instructions.instruction import (
    Instruction,
    compare,
    count,
    instruction,
    letter,
    position,
    relation,
    word,
    words,
)
from open_instruct.verifiers.instructions.parts import bare, sentences, words_and_marks, words_of

SHORTEST_PALINDROME = 3
"""In letters. A single letter such as `a` does not count, because no instruction asks for it."""


def occurrences(response: str, keyword: str) -> int:
    """How often the keyword occurs, in upper or lower case, including inside longer words."""
    return len(re.findall(re.escape(keyword), response, re.IGNORECASE))


def has_word(response: str, keyword: str) -> bool:
    """Whether the keyword occurs as a whole word, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(keyword)}(?!\w)", response, re.IGNORECASE) is not None


def _existence(response: str, keywords: list[str]) -> bool:
    return all(occurrences(response, keyword) for keyword in keywords)


def _frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(occurrences(response, keyword), relation, frequency)


def _different_numbers(response: str, keyword: str, frequency: int, relation: str) -> bool:
    """The prompt says "should appear 3 times" for either relation, so exactly 3 is always right, and 0 never is."""
    number = occurrences(response, keyword)
    return number == frequency or (number > 0 and compare(number, relation, frequency))


def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(has_word(response, keyword) for keyword in forbidden_words)


def _increment(response: str, keyword1: str, keyword2: str) -> bool:
    return occurrences(response, keyword1) == 1 and occurrences(response, keyword2) == 2


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def _letter_counting(response: str, N: int, relation: str) -> bool:
    return compare(len(re.findall(r"[a-zA-Z]", response)), relation, N)


def _no_adjacent_consecutive(response: str) -> bool:
    """No word begins with the letter that follows, in the alphabet, the first letter of the previous word."""
    firsts = [token[0].lower() for token in response.split()]
    pairs = itertools.pairwise(firsts)
    return not any(a.isalpha() and b.isalpha() and ord(b[0]) - ord(a[0]) == 1 for a, b in pairs)


def _palindrome(response: str) -> bool:
    tokens = map(bare, response.split())
    return any(len(token) >= SHORTEST_PALINDROME and token.isalnum() and token == token[::-1] for token in tokens)


def _specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """The keyword is word `m` of sentence `n`, counted from 1, where marks may count as words or not."""
    parts = sentences(response)
    if len(parts) < n:
        return False
    readings = (words_of(parts[n - 1]), words_and_marks(parts[n - 1]))
    return any(len(reading) >= m and reading[m - 1] == keyword for reading in readings)


def _start_end(response: str) -> bool:
    """The same word begins and ends the response, with nothing after it."""
    tokens = words_of(response)
    return len(tokens) > 1 and tokens[0].lower() == tokens[-1].lower() and response.rstrip().endswith(tokens[-1])


def _lowercase_counting(response: str, N: int) -> bool:
    return len(re.findall(r"\b[a-z]+\b", response)) <= N


def _unique(response: str) -> bool:
    return max(Counter(map(str.lower, words_of(response))).values(), default=0) <= 1


def _capital_words(response: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(map(str.isupper, words_of(response))), capital_relation, capital_frequency)


INSTRUCTIONS: dict[str, Instruction] = {
    "keywords:existence": instruction(_existence, keywords=words),
    "keywords:frequency": instruction(_frequency, keyword=word, frequency=count, relation=relation),
    "keywords:forbidden_words": instruction(_forbidden, forbidden_words=words),
    "keywords:letter_frequency": instruction(
        _letter_frequency, letter=letter, let_frequency=count, let_relation=relation
    ),
    "keywords:no_adjacent_consecutive": instruction(_no_adjacent_consecutive),
    "keywords:word_once": instruction(lambda response, keyword: occurrences(response, keyword) == 1, keyword=word),
    "keywords:word_count_different_numbers": instruction(
        _different_numbers, keyword=word, frequency=count, relation=relation
    ),
    "keywords:exclude_word_harder": instruction(
        lambda response, keyword: not has_word(response, keyword), keyword=word
    ),
    "keywords:palindrome": instruction(_palindrome),
    "keywords:keyword_specific_position": instruction(_specific_position, keyword=word, n=position, m=position),
    "keywords:start_end": instruction(_start_end),
    "letters:letter_counting": instruction(_letter_counting, N=count, relation=relation),
    "letters:letter_counting2": instruction(
        _letter_frequency, letter=letter, let_frequency=count, let_relation=relation
    ),
    "count:lowercase_counting": instruction(_lowercase_counting, N=count),
    "count:count_unique": instruction(_unique),
    "count:count_increment_word": instruction(_increment, keyword1=word, keyword2=word),
    "change_case:capital_word_frequency": instruction(
        _capital_words, capital_frequency=count, capital_relation=relation
    ),
}
