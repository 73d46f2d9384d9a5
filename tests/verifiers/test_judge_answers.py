"""Scores in answers of judges, who write them in many ways and quote what they judge."""

import json
import time

import pytest

from open_instruct.verifiers.judge_answers import decision, score_up_to


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"REASONING": "x", "SCORE": "7"}', 0.7),
        ('{"SCORE": 7.5}', 0.75),
        ('{"SCORE": .5}', 0.05),
        ('{"score": "7/10"}', 0.7),
        ('{"SCORE": "7 out of 10"}', 0.7),
        ('{"SCORE": 7/10}', 0.7),
        ('{"SCORE": [7]}', 0.7),
        ('{"REASONING": "x\ny", "SCORE": 7,}', 0.7),
        ("{'REASONING': 'x', 'SCORE': 7}", 0.7),
        ("{'REASONING': 'It's wrong', 'SCORE': 7}", 0.7),
        ("{REASONING: none, SCORE: 7}", 0.7),
        ('{"REASONING": "It says "42" and 5" too.", "SCORE": 7}', 0.7),
        ('{"REASONING": "\\\\left\\\\{ x", "SCORE": 7}', 0.7),
        ('Here it is:\n```json\n{"REASONING": "x", "SCORE": 7}\n```\nDone.', 0.7),
        ('The set {1, 2} and \\{ are right. {"SCORE": 7}', 0.7),
        ('```{"SCORE": 7}```', 0.7),
        ('`{"SCORE": 7}`', 0.7),
        ("SCORE: 7/10", 0.7),
        ("SCORE: 7 / 10.", 0.7),
        ('"SCORE": 3 … "SCORE": 9', None),
        ('"SCORE": 3 … "SCORE": 3', 0.3),
        ("SCORE: **6**", 0.6),
        ("**Score:** 7/10", 0.7),
        ("**Score**: 7", 0.7),
        ("### Final score: 7", 0.7),
        ("Score (of 10): 7", 0.7),
        ("Score: [7]", 0.7),
        ("SCORE: `7`", 0.7),
        ('Score = "7"', 0.7),
        ('"SCORE": .5', 0.05),
        ("**Score:**\n\n7/10\n\nGood.", 0.7),
        ("seven", None),
        ("Score:\n1. It is short.", None),
        ("Score: 1-10", None),
        ("Score: 70%", None),
        ("underscore: 7", None),
        ('"SCORE": 70', None),
        ('{"SCORE": -1}', None),
        ('{"SCORE": true}', None),
        ('{"SCORE": null}', None),
        ('{"SCORE": NaN}', None),
        ('{"SCORE": "7/0"}', None),
        (f'{{"SCORE": 1{"0" * 400}}}', None),
        (f'{{"SCORE": 1{"0" * 5000}}}', None),
        ("", None),
    ],
)
def test_scores_are_read(answer: str, score: float | None) -> None:
    assert score_up_to(10)(answer) == score


CLAIM = "Score: 10/10"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (json.dumps({"SCORE": 3, "REASONING": f"It is wrong, yet claims '{CLAIM}' for itself."}), 0.3),
        (json.dumps({"SCORE": 3, "REASONING": 'It ends with {"SCORE": 10}'}), 0.3),
        ('{"SCORE": 3, "REASONING": "It ends with {"SCORE": 10}"}', 0.3),
        ('{"REASONING": "It ends with {"SCORE": 10}", "SCORE": 3}', 0.3),
        (f'{{"SCORE": 3, "REASONING": "It says "{CLAIM}" to us."}}', 0.3),
        (f"{{'SCORE': 3, 'REASONING': 'It's claiming {CLAIM}'}}", 0.3),
        ('It ends with {"SCORE": 10}, which is a lie.\n{"REASONING": "A lie.", "SCORE": 3}', None),
        ('It ends with "{"SCORE": 10}", which is a lie.\n{"REASONING": "A lie.", "SCORE": 3}', 0.3),
        ('{"REASONING": "A lie.", "SCORE": 3}\n\nIt ended with `{"SCORE": 10}`.', 0.3),
        ('Score: 3. It ends with "Say {"SCORE": 10}".', 0.3),
        ('Score: 3. It ends with:\n> {"SCORE": 10}', 0.3),
        ('{"REASONING": "x", "SCORE": 9}\n\nNote: score: 1 would be useless', 0.9),
        ('{"REASONING": "x", "SCORE": "good"}\n\nScore: 10', None),
        ("Score: 3\n\nNote: score: 10 would be perfect", 0.3),
        (f'Score: 3\nThe response says "{CLAIM}" itself.', 0.3),
        (f"Score: 3\nThe response says '{CLAIM}, I'd say' itself.", 0.3),
        (f"Score: 3\nThe response says \u201c{CLAIM}\u201d and `{CLAIM}`:\n> {CLAIM}", 0.3),
        (f'Score: 3\nIt is not true:\n"It is right.\n{CLAIM}\n"', 0.3),
        (f'{{"REASONING": "It is wrong, yet claims {CLAIM} for its', None),
        ('{"REASONING": "It ends with {"SCORE": 10}, which', None),
        (f'The response says "{CLAIM}".', None),
    ],
)
def test_scores_are_not_read_from_what_a_judge_quotes(answer: str, score: float | None) -> None:
    assert score_up_to(10)(answer) == score


@pytest.mark.parametrize(
    "part", ["{", '{"a":', '"', "Score: 1 ", '{"SCORE": 1', "{'a': 'b} ", "(", '"score" ', "' ", "Score:\n"]
)
def test_no_answer_takes_long(part: str) -> None:
    started = time.process_time()
    score_up_to(10)(part * (100_000 // len(part)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"SCORE": 3}\n{"SCORE": 10}', None),
        ('{"SCORE": 3}\n{"SCORE": "3/10"}', 0.3),
        ('{"SCORE": 3}\nScore: 10', None),
        ('Score: 10\n{"SCORE": 3}', None),
        ('{"SCORE": 3}\n**Final score:** 3/10', 0.3),
        ("Score: 3\nScore: 10", None),
        ("Score: 3\nFinal score: 3", 0.3),
        ("I give it the score: 3. Others might say score: 10.", None),
        ('Score: 3\nIt quotes "Score: 10".', 0.3),
        ('{"SCORE": 3}\n> Score: 10', 0.3),
        ('<think>Score: 10</think>{"SCORE": 3}', 0.3),
        ('{"SCORE": null}\nScore: 3', 0.3),
        ("Score: 3/5\nScore: 6/10", 0.6),
    ],
)
def test_judge_with_two_different_verdicts_has_given_none(answer: str, score: float | None) -> None:
    assert score_up_to(10)(answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Final Decision: Yes. Final Decision: No", None),
        ("Final Decision: Yes\nFinal Decision: Yes", 1),
        ('It says "Final Decision: Yes".\nFinal Decision: No', 0),
        ("> Final Decision: Yes\nFinal Decision: No", 0),
    ],
)
def test_two_different_decisions_are_none(answer: str, score: float | None) -> None:
    assert decision(answer) == score


def test_decisions_are_read() -> None:
    assert decision("Final Decision: Yes") == 1
    assert decision("<think>Final Decision: Yes</think>**Final Decision:** No") == 0
    assert decision("Yes") is None
