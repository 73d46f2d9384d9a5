"""Each instruction of `ifeval` and `ifeval_old`: responses that follow it, responses that do not, and labels that are refused."""

import json
import re
import time
from typing import Any

import pytest

from open_instruct.verifiers.instructions.ifeval import INSTRUCTIONS, read_constraints
from open_instruct.verifiers.instructions.ifeval_old import FUNCTIONS, read_function
from open_instruct.verifiers.instructions.instruction import Instruction
from open_instruct.verifiers.instructions.parts import parts_between, sentences, words_of
from open_instruct.verifiers.registry import check_label, score_response

Case = tuple[dict[str, Any], list[str], list[str]]
"""Arguments; responses that follow the instruction; responses that do not."""
AT_LEAST_2 = {"relation": "at least"}
PHRASE = "The early bird catches the worm"
REQUEST = {"prompt_to_repeat": "Write a poem."}

CASES: list[tuple[str, Case]] = [
    ("keywords:existence", ({"keywords": ["cat", "dog"]}, ["A Cat and dogs."], ["A cat.", "A cow."])),
    (
        "keywords:frequency",
        (
            {"keyword": "cat", "frequency": 2, "relation": "at least"},
            ["cat Cat", "cats, concatenated"],
            ["cat", "dog"],
        ),
    ),
    ("keywords:frequency", ({"keyword": "cat", "frequency": 2, "relation": "less than"}, ["cat", ""], ["cat cat"])),
    ("keywords:forbidden_words", ({"forbidden_words": ["cat"]}, ["concatenate"], ["a CAT."])),
    (
        "keywords:letter_frequency",
        ({"letter": "a", "let_frequency": 3, "let_relation": "at least"}, ["Banana"], ["band"]),
    ),
    ("keywords:no_adjacent_consecutive", ({}, ["a cat, every day"], ["a banana"])),
    ("keywords:word_once", ({"keyword": "cat"}, ["One cat."], ["cat cat", "dog"])),
    (
        "keywords:word_count_different_numbers",
        ({"keyword": "cat", "frequency": 2, "relation": "at least"}, ["cat cat", "cat cat cat"], ["cat", "dog"]),
    ),
    (
        "keywords:word_count_different_numbers",
        ({"keyword": "cat", "frequency": 2, "relation": "less than"}, ["cat", "cat cat"], ["cat cat cat", "dog"]),
    ),
    ("keywords:exclude_word_harder", ({"keyword": "cat"}, ["concatenate"], ["cat.", "The cat sat."])),
    ("keywords:palindrome", ({}, ["At noon, we ate.", "Level!"], ["I saw a cat.", "a -- b"])),
    (
        "keywords:keyword_specific_position",
        ({"keyword": "cat", "n": 2, "m": 3}, ["Hello. See the cat."], ["See the cat.", "Hello. The cat."]),
    ),
    ("keywords:start_end", ({}, ["End it at the end", "So be it, so"], ["End it.", "one", "end the end."])),
    ("letters:letter_counting", ({"N": 4, "relation": "at least"}, ["ab 12 cd"], ["abc 1234"])),
    (
        "letters:letter_counting2",
        ({"letter": "z", "let_frequency": 1, "let_relation": "less than"}, ["cat"], ["Zebra"]),
    ),
    ("count:lowercase_counting", ({"N": 2}, ["ONE two three"], ["one two three"])),
    ("count:count_unique", ({}, ["Each word, once, here."], ["A cat is a cat."])),
    (
        "count:count_increment_word",
        ({"keyword1": "cat", "keyword2": "dog"}, ["cat dog dog"], ["cat dog", "cat cat dog dog"]),
    ),
    (
        "change_case:capital_word_frequency",
        ({"capital_frequency": 2, "capital_relation": "at least"}, ["NOW or NEVER"], ["NOW or never"]),
    ),
    (
        "length_constraints:number_sentences",
        (
            {"num_sentences": 2, "relation": "at least"},
            ["One. Two!", "Dr. Who came. He left."],
            ["One.", "Dr. Who came.", "It costs 3.14 dollars"],
        ),
    ),
    (
        "length_constraints:number_words",
        ({"num_words": 3, "relation": "less than"}, ["two words"], ["now three words"]),
    ),
    (
        "length_constraints:number_paragraphs",
        ({"num_paragraphs": 2}, ["a\n***\nb", "a\n***\nb\n***\n"], ["a", "a\n\nb"]),
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "but"},
            ["One.\n\nBut, two."],
            ["But.\n\nTwo.", "One.\n\nBut.\n\nThree."],
        ),
    ),
    ("paragraphs:paragraphs", ({}, ["a\n***\nb"], ["a\n***\nb\n***\nc", "a"])),
    ("paragraphs:paragraphs2", ({}, ["a\n\nb"], ["a\nb", "a\n\nb\n\nc"])),
    (
        "count:counting_composition",
        (
            {"n_sent": 1, "n_words": 2},
            ["Hello there.\n* * *\nMore words.\n* * *\nLast ones."],
            ["Hello there.\n* * *\nMore words.", "Hello there you.\n* * *\nMore words.\n* * *\nLast ones."],
        ),
    ),
    ("first_word:first_word_sent", ({"first_word": "the"}, ["The cat. The dog."], ["The cat. A dog."])),
    ("first_word:first_word_answer", ({"first_word": "the"}, ["The cat.", '"The" cat'], ["Theory", "A the"])),
    ("last_word:last_word_sent", ({"last_word": "cat"}, ["A cat. The cat!"], ["A cat. A dog."])),
    ("last_word:last_word_answer", ({"last_word": "cat"}, ["The dog. The Cat."], ["The cat is."])),
    ("detectable_content:number_placeholders", ({"num_placeholders": 2}, ["[name] in [town]"], ["[name]", "[a b"])),
    ("detectable_content:postscript", ({"postscript_marker": "P.S."}, ["Bye.\nP.S. Hi", "p. s. hi"], ["Bye. PS"])),
    ("detectable_content:postscript", ({"postscript_marker": "P.P.S"}, ["P.P.S Hi"], ["P.S. Hi"])),
    (
        "detectable_format:number_bullet_lists",
        ({"num_bullets": 2}, ["* a\n- b"], ["* a", "* a\n* b\n* c", "**a**\n* b"]),
    ),
    ("detectable_format:constrained_response", ({}, ["My answer is yes.", "So: My answer is no."], ["Yes.", ""])),
    ("detectable_format:number_highlighted_sections", ({"num_highlights": 2}, ["*a* and **b**"], ["*a*", "** ** *a*"])),
    (
        "detectable_format:multiple_sections",
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb"],
            ["Section 1\na", "Section one Section two"],
        ),
    ),
    ("detectable_format:json_format", ({}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["{a: 1}", 'Here: {"a": 1}'])),
    ("detectable_format:title", ({}, ["<<A poem>>\nroses"], ["<A poem>", "<< >>"])),
    ("detectable_format:sentence_hyphens", ({}, ["One.-Two.-Three.", "One."], ["One. Two.", "One. -Two."])),
    ("detectable_format:square_brackets", ({}, ["[every] [word]"], ["[every] word"])),
    ("detectable_format:bigram_wrapping", ({}, ["<<two words>> <<and two>>"], ["<<two words>> and two"])),
    (
        "startend:end_checker",
        ({"end_phrase": "Any other questions?"}, ["So. any other questions?"], ["Any other questions? No."]),
    ),
    ("startend:quotation", ({}, ['"All of it."'], ['"All" of it.', '"'])),
    ("punctuation:no_comma", ({}, ["None."], ["One, two."])),
    ("punctuation:punctuation_dot", ({}, ["No dot!"], ["A dot."])),
    ("punctuation:punctuation_exclamation", ({}, ["None."], ["One!"])),
    ("combination:two_responses", ({}, ["a ****** b"], ["a ****** a", "a", "a ****** b ****** c"])),
    ("combination:repeat_prompt", (REQUEST, ["Write a poem. Roses"], ["Roses. Write a poem."])),
    (
        "copy:repeat_phrase",
        (
            {"phrase": PHRASE, "small_n": 2},
            ["The late bird catches the worm. The early cat catches the worm."],
            ["The late bird catches the worm.", f"{PHRASE}. {PHRASE}."],
        ),
    ),
    ("copy:copy", (REQUEST, ["write a poem."], ["Write a poem. Roses"])),
    ("copy:copying_simple", (REQUEST, [" Write a poem.\n"], ["Write a poem. Roses"])),
    (
        "copy:copying_multiple",
        (REQUEST | {"N": 2}, ["Write a poem.\n******\nWrite a poem."], ["Write a poem.", "Write a poem.\n******\nNo."]),
    ),
    ("new:copy_span_idx", (REQUEST | {"n_start": 0, "n_end": 5}, ["Write"], ["Write a", "poem"])),
    (
        "language:response_language",
        ({"language": "de"}, ["Das ist ein deutscher Satz."], ["An English sentence.", "42"]),
    ),
    (
        "change_case:english_capital",
        ({}, ["THIS IS AN ENGLISH SENTENCE OF SOME LENGTH.", "OK."], ["This is not.", "DAS IST KEIN ENGLISCHER SATZ."]),
    ),
    (
        "change_case:english_lowercase",
        ({}, ["this is an english sentence of some length."], ["This is not.", "das ist kein englischer satz."]),
    ),
]

OLD_CASES: list[tuple[str, Case]] = [
    ("verify_keywords", ({"keyword_list": ["cat", "dog"]}, ["Cats and dogs"], ["A cat"])),
    ("verify_keyword_frequency", ({"word": "cat", "N": 2}, ["cat, Cat"], ["cats cat", "cat cat cat"])),
    ("validate_forbidden_words", ({"forbidden_words": ["cat"]}, ["A dog"], ["concatenate"])),
    ("verify_letter_frequency", ({"letter": "a", "N": 2}, ["Abaca"], ["aaa"])),
    (
        "validate_response_language",
        ({"language": "de"}, ["Das ist ein deutscher Satz."], ["An English sentence.", "42"]),
    ),
    ("verify_paragraph_count", ({"N": 2}, ["a\n* * *\nb"], ["a", "a\n* * *\n"])),
    ("validate_word_constraint", ({"N": 10, "quantifier": "around"}, ["w " * 9, "w " * 11], ["w " * 8, "w " * 12])),
    ("validate_word_constraint", ({"N": 2, "quantifier": "at most"}, ["a b", "a"], ["a b c"])),
    ("verify_sentence_constraint", ({"N": 2, "quantifier": "at least"}, ["One. Two."], ["One."])),
    ("validate_paragraphs", ({"N": 2, "first_word": "But", "i": 2}, ["One.\n\nBut two."], ["But.\n\nTwo."])),
    ("verify_postscript", ({"postscript_marker": "P.S."}, ["Bye. P.S. Hi"], ["Bye. P.S.", "Bye."])),
    ("validate_placeholders", ({"N": 1}, ["[name]"], ["name"])),
    ("verify_bullet_points", ({"N": 2}, ["* a\n- b"], ["* a"])),
    ("validate_title", ({}, ["<<Title>>"], ["Title"])),
    ("validate_choice", ({"options": ["yes", "no"]}, ["I say yes"], ["maybe"])),
    ("validate_highlighted_sections", ({"N": 1}, ["*so*"], ["so"])),
    ("validate_sections", ({"N": 2, "section_splitter": "SECTION"}, ["SECTION 1 SECTION 2"], ["SECTION 1"])),
    ("validate_json_format", ({}, ['{"a": 1}'], ["{a: 1}"])),
    ("validate_repeat_prompt", ({"original_prompt": "Write."}, ["Write. Roses"], ["Roses. Write."])),
    ("validate_two_responses", ({}, ["a******b"], ["a******a", "a"])),
    ("validate_uppercase", ({}, ["LOUD"], ["Loud"])),
    ("validate_lowercase", ({}, ["quiet"], ["Quiet"])),
    ("validate_frequency_capital_words", ({"N": 2, "quantifier": "at least"}, ["NOW or NEVER"], ["NOW"])),
    ("validate_end", ({"end_phrase": "The end"}, ["So. The end"], ["The end."])),
    ("validate_quotation", ({}, ['"So"'], ["So"])),
    ("validate_no_commas", ({}, ["So"], ["So, no"])),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[name for name, _ in CASES])
def test_instructions(name: str, case: Case) -> None:
    arguments, followed, broken = case
    label = {"instruction_id": [name], "kwargs": [arguments]}
    (constraint,) = read_constraints(label)
    assert [response for response in followed if not constraint.is_followed(response)] == []
    assert [response for response in broken if constraint.is_followed(response)] == []


@pytest.mark.parametrize(("name", "case"), OLD_CASES, ids=[name for name, _ in OLD_CASES])
def test_functions(name: str, case: Case) -> None:
    arguments, followed, broken = case
    function, kwargs = read_function(json.dumps({"func_name": name, **arguments}))
    assert [response for response in followed if not function.follows(response, **kwargs)] == []
    assert [response for response in broken if function.follows(response, **kwargs)] == []


def test_each_instruction_has_a_case() -> None:
    assert {name for name, _ in CASES} == set(INSTRUCTIONS)
    assert {name for name, _ in OLD_CASES} == set(FUNCTIONS)
    assert len(INSTRUCTIONS) == 54
    assert len(FUNCTIONS) == 25


# --- labels -----------------------------------------------------------------------------------------------------------

LABEL = {"instruction_id": ["punctuation:no_comma", "keywords:existence"], "kwargs": [None, {"keywords": ["cat"]}]}


@pytest.mark.parametrize(
    "label", [LABEL, [LABEL], json.dumps(LABEL), json.dumps([LABEL]), [json.dumps([LABEL])], repr([LABEL])]
)
def test_the_score_is_the_share_of_instructions(label: object) -> None:
    assert score_response("ifeval", label, [], "A cat.").score == 1
    assert score_response("ifeval", label, [], "A cat, a dog.").score == 0.5
    assert score_response("ifeval", label, [], "One, two.").score == 0
    assert score_response("ifeval", label, [], "<think>One, two.</think><answer>A cat.</answer>").score == 1
    assert score_response("ifeval", label, [], "A cat <think> </think>").score == 0  # nothing behind its thoughts


def test_missing_arguments_of_parquet_files_are_absent() -> None:
    kwargs = {"num_words": 3.0, "relation": "at least", "keywords": None, "letter": None}
    label = {"instruction_id": ["length_constraints:number_words"], "kwargs": [kwargs]}
    assert score_response("ifeval", label, [], "one two three").score == 1


@pytest.mark.parametrize(
    ("dataset", "label", "problem"),
    [
        ("ifeval", "x", "neither JSON nor a literal of Python"),
        ("ifeval", [LABEL, LABEL], "must be a mapping, or a list of one"),
        ("ifeval", {"instruction_id": ["x"], "kwargs": [{}]}, "no instruction is called 'x'"),
        ("ifeval", {"instruction_id": ["x"], "kwargs": []}, "lists of one length"),
        ("ifeval", {"func_name": "validate_title"}, "--remap_verifier ifeval=ifeval_old"),
        (
            "ifeval",
            {"instruction_id": ["keywords:word_once"], "kwargs": [{}]},
            "keywords:word_once: it needs keyword",
        ),
        (
            "ifeval",
            {"instruction_id": ["keywords:word_once"], "kwargs": [{"keyword": 3}]},
            "keywords:word_once: keyword must be a text, got 3",
        ),
        (
            "ifeval",
            {"instruction_id": ["startend:quotation"], "kwargs": [{"keyword": "x"}]},
            "startend:quotation: it has no argument keyword",
        ),
        (
            "ifeval",
            {"instruction_id": ["length_constraints:number_words"], "kwargs": [{"num_words": 2.5, "relation": "most"}]},
            "num_words must be a whole number from 0 on, got 2.5",
        ),
        ("ifeval", {"instruction_id": ["language:response_language"], "kwargs": [{"language": "xx"}]}, "the code of"),
        ("ifeval_old", {"func_name": "validate_tite"}, "one of open-instruct's 25 functions, got 'validate_tite'"),
        (
            "ifeval_old",
            {"func_name": "validate_word_constraint", "N": 3, "quantifier": "most"},
            "validate_word_constraint: quantifier must be 'at least', 'around' or 'at most', got 'most'",
        ),
    ],
)
def test_labels_that_cannot_be_checked_are_refused(dataset: str, label: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_label(dataset, label)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("One. Two? Three!", 3),
        ("Dr. J. Smith pays $3.50, e.g. today. Mr. Bean pays.", 2),
        ('He said "Go." She went.', 2),
        ("1. First point.\n2. Second point.", 2),
        ("Well... yes. No.", 2),
        ("Title\nOne sentence", 1),
        ("一。二。三。", 3),
        ("", 0),
        ("   \n", 0),
    ],
)
def test_sentences(text: str, number: int) -> None:
    assert len(sentences(text)) == number


def test_words() -> None:
    assert words_of("Don't, well-known U.S. (3.14) -- 'quoted'") == ["Don't", "well-known", "U.S", "3.14", "quoted"]


@pytest.mark.parametrize(
    ("text", "parts"), [("a***b", 2), ("***a***b***", 2), ("a******b", None), ("a", 1), ("a *** *** b", None)]
)
def test_parts_between_dividers(text: str, parts: int | None) -> None:
    texts = parts_between(text, "***")
    assert (len(texts) if texts is not None else None) == parts


# --- hostile responses ------------------------------------------------------------------------------------------------

HOSTILE = [
    *(char * 1_000_000 for char in "a.*-[<\"' \n\u0301\U0001f600{,"),
    *(pair * 500_000 for pair in ("a.", "* ", "<<", "[]", "a-", "\n\n", "\r\n", "Aa", "P.")),
    *("The early bird " * 60_000, "****** " * 140_000, "Section 1 " * 100_000, "\x00" * 1000, "\ud800"),
]


def filled(instruction: Instruction, name: str) -> dict[str, Any]:
    cases = [case for key, case in [*CASES, *OLD_CASES] if key == name]
    return instruction.read(cases[0][0])


@pytest.mark.parametrize("name", [*INSTRUCTIONS, *FUNCTIONS])
def test_a_megabyte_is_checked_in_seconds(name: str) -> None:
    instruction = (INSTRUCTIONS | FUNCTIONS)[name]
    arguments = filled(instruction, name)
    slowest = 0.0
    for response in HOSTILE:
        started = time.process_time()
        assert instruction.follows(response, **arguments) in (True, False)
        slowest = max(slowest, time.process_time() - started)
    assert slowest < 5
