"""No verifier reads thoughts: the answer is what stands behind the last `</think>`, and thoughts without an end have none."""

import asyncio

import pytest

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.reasoning_gym_data import decode_item, reasoning_gym_rows
from open_instruct.verifiers.registry import build_all_verifiers, score_response
from open_instruct.verifiers.text_verifiers import behind_thoughts, judged_part
from open_instruct.verifiers.thoughts import answer_part

IFEVAL = {"instruction_id": ["keywords:existence"], "kwargs": [{"keywords": ["hen"]}]}
ANSWERS: dict[str, tuple[object, str, str]] = {
    "gsm8k": ("42", "It is 42.", "It is 41."),
    "math": ("42", r"It is $\boxed{42}$.", r"It is $\boxed{41}$."),
    "strict_math": ("42", "The final answer is $42$.", "The final answer is $41$."),
    "string_matcher": ("hen", "<answer>hen</answer>", "<answer>fox</answer>"),
    "flan": ("hen", "The answer is: hen", "The answer is: fox"),
    "string_f1": ("hen", "hen", "fox"),
    "puzzle": ("hen", "<answer>hen</answer>", "<answer>fox</answer>"),
    "re_search": ("hen", "<finish>hen</finish>", "<finish>fox</finish>"),
    "re_search_f1": ("hen", "<finish>hen</finish>", "fox"),
    "ifeval": (IFEVAL, "A hen.", "A fox."),
    "ifeval_old": ({"func_name": "verify_keywords", "keyword_list": ["hen"]}, "A hen.", "A fox."),
}
"""A label, a right and a wrong response for each verifier that reads text in the jail."""
OPENED = "User: how many?\nAssistant: <think>"
READ_NO_TEXT = {"passthrough", "max_length", "up_to_max_length", "reasoning_gym"}
"""`reasoning_gym` has a test of its own below."""


def score(name: str, text: str, prompt: str = "How many?") -> float:
    return score_response(name, ANSWERS[name][0], [], text, prompt).score


def test_every_verifier_that_reads_text_in_the_jail_is_tried_here() -> None:
    inside = {name for name, verifier in build_all_verifiers().items() if not verifier.is_outside()}
    own = {name for name in inside if type(build_all_verifiers()[name]).__module__.startswith("open_instruct.")}
    assert own - READ_NO_TEXT == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_verifier_reads_only_the_text_behind_the_last_thoughts(name: str) -> None:
    _, right, wrong = ANSWERS[name]
    for before in ("<think>{}</think>", "{}</think>\n", "<think>a</think><think>{}</think> ", "</think>{}</think>"):
        for prompt in ("How many?", OPENED):
            assert score(name, before.format(wrong) + right, prompt) == 1
            assert score(name, before.format(right) + wrong, prompt) == 0
            assert score(name, before.format(right) + "I give up", prompt) == 0


@pytest.mark.parametrize("name", ANSWERS)
def test_verifier_finds_no_answer_in_thoughts_without_an_end(name: str) -> None:
    right = ANSWERS[name][1]
    assert score(name, right) == 1
    assert score(name, f"<think>{right}") == 0
    assert score(name, f"<think>\n{right}\n{right}") == 0
    assert score(name, f"<think>a</think>\n<think>{right}") == 0
    for prompt in (OPENED, f"{OPENED}\n", f"{OPENED} \n\n"):
        assert score(name, right, prompt) == 0
    assert score(name, right, f"{OPENED}\n\n</think>\n\n") == 1  # the template has begun and ended empty thoughts


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"string_f1", "puzzle"}))
def test_a_tag_that_is_only_mentioned_begins_no_thoughts(name: str) -> None:
    """`string_f1` and `puzzle` compare the whole text, so a sentence about tags costs something there."""
    _, right, wrong = ANSWERS[name]
    for before in ("", "<think>a</think>", "a</think>\n"):
        for mention in ("The tag <think> begins thoughts. ", 'x = text.split("<think>")\n'):
            assert score(name, f"{before}{mention}{right}") == 1
            assert score(name, f"{before}{mention}{wrong}") == 0
    assert score(name, f"Well. <think>{wrong}</think>{right}") == 1
    assert score(name, f"Well. <think>{right}</think>{wrong}") == 0


def test_reasoning_gym_reads_only_the_text_behind_the_thoughts() -> None:
    row = reasoning_gym_rows("reasoning_gym/chain_sum?size=1")[0]
    name, label = row["dataset"], row["ground_truth"]
    right = f"<answer>{decode_item(label)['answer']}</answer>"
    for text, prompt, expected in (
        (right, "", 1),
        (f"<think><answer>x</answer></think>{right}", "", 1),
        (f"<think>{right}</think>none", "", 0),
        (f"<think>{right}", "", 0),
        (right, OPENED, 0),
    ):
        assert score_response(name, label, [], text, prompt).score == expected


@pytest.mark.parametrize(("text", "prompt"), [("<think>A hen is right.", "Which?"), ("A hen is right.", OPENED)])
def test_judges_and_programs_are_not_asked_about_thoughts_without_an_end(text: str, prompt: str) -> None:
    rubric = {"query": "Which?", "rubrics": [{"description": "It names a hen.", "weight": 1.0}]}
    verifiers = build_all_verifiers(VerifierConfig(llm_judge_api_base="http://127.0.0.1:9"))
    labels = {
        "general-quality_ref": "hen",
        "rubric": rubric,
        "code": ["assert True"],
        "code_stdio": [{"input": "", "output": ""}],
    }
    for name, label in labels.items():
        result = asyncio.run(verifiers[name].async_call([], text, label, prompt))
        assert (result.score, result.cost) == (0, 0)
        assert result.reasoning == "the thoughts never end, so there is no answer"


def test_answer_part_is_the_text_behind_the_last_closing_tag() -> None:
    assert answer_part("a") == "a"
    assert answer_part("<think>a</think>b") == "b"
    assert answer_part("a</think>b</think>c") == "c"
    assert answer_part("<think>a") is None
    assert answer_part("a", OPENED) is None
    assert answer_part(" \n<think>a") is None
    assert answer_part("a</think> <think>b") is None
    assert answer_part("a <think> b") == "a <think> b"
    assert answer_part("a</think>b", OPENED) == "b"
    assert (behind_thoughts("<think>a"), judged_part("<think>a")) == ("", None)
