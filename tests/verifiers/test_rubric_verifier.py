"""Rubrics: one question to the judge for each criterion."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from judges import JudgeServer

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers import judge
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import check_label, import_verifiers
from open_instruct.verifiers.rubric_verifier import MODEL, read_rubric
from open_instruct.verifiers.scoring_processes import Scored


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.01)
    judge_server = JudgeServer()
    yield judge_server
    judge_server.close()


RUBRIC = {
    "query": "Why is the sky blue?",
    "rubrics": [
        {"description": "names scattering", "weight": 3.0},
        {"rubric_item": "is short"},
        {"Ingredient": "insults the reader", "weight": -1.0},
    ],
}


def judged(server: JudgeServer, label: object, text: str, **options: Any) -> Scored:
    settings: dict[str, Any] = {"llm_judge_model": "a-judge", "llm_judge_timeout": 5, "llm_judge_api_base": server.url}
    config = VerifierConfig(**settings | options)
    import_verifiers([], config)
    try:
        with VerifierPool(1, 5.0, config=config) as pool:
            (scored,) = pool.score_group("rubric", label, [[]], [text], "asked by the row's prompt")
            return scored
    finally:
        import_verifiers([])


def scores_by(points: dict[str, int]) -> Any:
    """A judge that gives points by the criterion that it is told."""

    def answer(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][0]["content"].partition("The conversation")[0]
        (mark,) = [score for criterion, score in points.items() if criterion in prompt]
        return f'{{"SCORE": {mark}}}'

    return answer


@pytest.mark.parametrize(
    ("points", "score"),
    [
        ({"scattering": 2, "short": 2, "insults": 0}, 4 / 5),
        ({"scattering": 1, "short": 0, "insults": 0}, 1.5 / 5),
        ({"scattering": 0, "short": 0, "insults": 2}, 0.0),
        ({"scattering": 2, "short": 2, "insults": 2}, 3 / 5),
    ],
)
@pytest.mark.parametrize("label", [RUBRIC, json.dumps(RUBRIC), [json.dumps(RUBRIC)]])
def test_scores_are_weighted(server: JudgeServer, points: dict[str, int], score: float, label: object) -> None:
    server.answer = scores_by(points)
    scored = judged(server, label, "By scattering.", llm_judge_price_per_million_tokens=[1.0, 5.0])
    assert scored.score == pytest.approx(score)
    assert scored.cost == pytest.approx(3 * 0.002)
    assert len(server.bodies) == 3


def test_the_judge_sees_the_answer_alone_and_the_question(server: JudgeServer) -> None:
    server.answer = scores_by({"scattering": 2, "short": 2, "insults": 0})
    judged(server, RUBRIC, "<think>secret</think> Well. <answer>no</answer> <answer> By scattering. </answer>")
    for body in server.bodies:
        prompt = body["messages"][0]["content"]
        assert "Why is the sky blue?" in prompt
        assert "\nBy scattering.\n" in prompt
        assert "secret" not in prompt
        assert "asked by the row" not in prompt


def test_without_a_question_the_prompt_is_told(server: JudgeServer) -> None:
    server.answer = lambda body, number: '{"SCORE": 2}'
    judged(server, {"rubrics": [{"description": "is kind"}]}, "x")
    assert "asked by the row's prompt" in server.bodies[0]["messages"][0]["content"]


def test_a_criterion_that_cannot_be_judged_leaves_the_response_not_scored(server: JudgeServer) -> None:
    server.answer = lambda body, number: "?" if "is short" in body["messages"][0]["content"] else '{"SCORE": 2}'
    scored = judged(server, RUBRIC, "x")
    assert scored.score is None
    assert "holds no score" in str(scored.failure)


def test_the_judge_of_rubrics_may_be_another(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, "openai/another-judge")
    server.answer = lambda body, number: '{"SCORE": 2}'
    judged(server, RUBRIC, "x")
    assert {body["model"] for body in server.bodies} == {"another-judge"}


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("x", "a rubric must be {query, rubrics} or its JSON, got 'x'"),
        ([], "with at least one criterion"),
        ({"query": "x"}, "with at least one criterion"),
        ({"rubrics": []}, "with at least one criterion"),
        ({"rubrics": ["is kind"]}, "a criterion must be {description, weight}, got 'is kind'"),
        ({"rubrics": [{"weight": 1}]}, "a criterion must be {description, weight}"),
        ({"rubrics": [{"description": "x", "weight": "1"}]}, "the weight of a criterion must be a number, got '1'"),
        ({"rubrics": [{"description": "x", "weight": float("nan")}]}, "must be a number"),
        ({"rubrics": [{"description": "x", "weight": 0}]}, "each criterion of the rubric has the weight 0"),
    ],
)
def test_labels_that_are_no_rubric_are_refused(label: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_rubric(label)


def test_without_a_judge_rows_are_refused() -> None:
    import_verifiers([])
    with pytest.raises(ValueError, match="rubric: no judge is named"):
        check_label("rubric", RUBRIC)


def test_judgements_beside_one_that_is_missing_cost_too(server: JudgeServer) -> None:
    server.answer = lambda body, number: "no score" if "is short" in str(body) else '{"SCORE": 1}'
    scored = judged(server, RUBRIC, "x", llm_judge_price_per_million_tokens=[1.0, 5.0])
    assert (scored.score, scored.failure) == (None, "unavailable: the judge's answer holds no score")
    assert scored.cost == pytest.approx((2 + 3) * 0.002)
