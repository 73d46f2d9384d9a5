"""Criteria that are found during a run: asked for beside training, capped, kept in checkpoints."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judges import JudgeServer

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers import judge
from open_instruct.verifiers.evolving_rubrics import MODEL, EvolvingRubrics, read_new_criteria
from open_instruct.verifiers.judge_prompts import new_criteria_question
from open_instruct.verifiers.rubric_verifier import Criterion, read_rubric

LABEL = {"query": "Why is the sky blue?", "rubrics": [{"description": "names scattering", "weight": 2.0}]}
GOOD, BAD = Criterion("gives an example", 1.0), Criterion("contradicts itself", -1.0)
ANSWER = json.dumps(
    {
        "positive_rubrics": [{"title": "Example", "description": "gives an example"}],
        "negative_rubrics": [{"title": "Contradiction", "description": "contradicts itself"}],
    }
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.01)
    judge_server = JudgeServer()
    judge_server.answer = lambda body, number: ANSWER
    yield judge_server
    judge_server.close()


def rubrics_of(
    server: JudgeServer, max_active: int = 5, directory: Path | None = None, **options: Any
) -> EvolvingRubrics:
    settings: dict[str, Any] = {"llm_judge_model": "a-judge", "llm_judge_timeout": 5, "llm_judge_api_base": server.url}
    return EvolvingRubrics(VerifierConfig(**settings | options), max_active, directory)


@pytest.fixture
def rubrics(server: JudgeServer) -> Iterator[EvolvingRubrics]:
    evolving = rubrics_of(server, llm_judge_price_per_million_tokens=[1.0, 5.0])
    yield evolving
    evolving.close()


def learn(rubrics: EvolvingRubrics, label: object = LABEL, step: int = 1) -> None:
    future = rubrics.learn(step, [(label, ["By scattering.", "It is not blue."])])
    assert future is not None
    future.result(20)


def found_in(label: object) -> list[Criterion]:
    return read_rubric(label)[1]


@pytest.mark.parametrize("label", [LABEL, json.dumps(LABEL), [json.dumps(LABEL)]])
def test_what_is_found_counts_beside_what_the_row_says(rubrics: EvolvingRubrics, label: object) -> None:
    assert rubrics.label(label) is label
    learn(rubrics, label)
    assert found_in(rubrics.label(label)) == [Criterion("names scattering", 2.0), GOOD, BAD]
    assert read_rubric(rubrics.label(label))[0] == "Why is the sky blue?"
    other = {"query": "another", "rubrics": LABEL["rubrics"]}
    assert rubrics.label(other) is other


def test_the_model_sees_responses_and_what_is_known(rubrics: EvolvingRubrics, server: JudgeServer) -> None:
    learn(rubrics)
    learn(rubrics)
    first, second = (body["messages"][0]["content"] for body in server.bodies)
    for prompt in (first, second):
        assert "Why is the sky blue?" in prompt
        assert "\nBy scattering.\n" in prompt
        assert "\nIt is not blue.\n" in prompt
        assert "- names scattering" in prompt
    assert "- gives an example" not in first
    assert "- gives an example" in second


def test_the_model_sees_what_the_judge_of_a_rubric_sees(rubrics: EvolvingRubrics, server: JudgeServer) -> None:
    responses = [
        "<think>hmm, first</think>By scattering.",
        "Well, <answer>No</answer> or <answer> it is not. </answer>",
        "Plain.",
    ]
    future = rubrics.learn(1, [(LABEL, responses)])
    assert future is not None
    future.result(20)
    prompt = server.bodies[0]["messages"][0]["content"]
    parts = re.findall(r"Response [0-9]:\n(\w+)\n(.*)\n\1", prompt)
    assert [text for _, text in parts] == ["By scattering.", "it is not.", "Plain."]


def test_a_criterion_beside_which_nothing_could_be_judged_does_not_count(server: JudgeServer) -> None:
    criteria = [{"description": "c" * length} for length in (3000, 30_000)]
    server.answer = lambda body, number: json.dumps({"positive_rubrics": criteria})
    rubrics = rubrics_of(server)
    learn(rubrics)
    assert [criterion.description for criterion in found_in(rubrics.label(LABEL))[1:]] == ["c" * 3000]
    rubrics.close()


def test_responses_that_do_not_fit_are_not_compared(server: JudgeServer) -> None:
    rubrics = rubrics_of(server, llm_judge_max_context_length=3048)
    future = rubrics.learn(1, [(LABEL, ["x" * 1000] * 64)])
    assert future is not None
    future.result(20)
    assert server.bodies == []
    assert rubrics.take_metrics()["evolving_rubrics/skipped"] == 1
    rubrics.close()


def test_the_same_criterion_is_not_found_twice(rubrics: EvolvingRubrics) -> None:
    learn(rubrics)
    learn(rubrics)
    assert found_in(rubrics.label(LABEL))[1:] == [GOOD, BAD]


def test_the_newest_count(server: JudgeServer) -> None:
    server.answer = lambda body, number: json.dumps({"positive_rubrics": [{"description": f"number {number}"}]})
    rubrics = rubrics_of(server, max_active=2)
    for step in range(1, 5):
        learn(rubrics, step=step)
    assert [criterion.description for criterion in found_in(rubrics.label(LABEL))[1:]] == ["number 3", "number 4"]
    assert rubrics.take_metrics()["evolving_rubrics/total_inactive"] == 2
    rubrics.close()


def test_metrics_are_of_the_comparisons_since_the_last_call(rubrics: EvolvingRubrics, server: JudgeServer) -> None:
    assert rubrics.take_metrics() == {}
    learn(rubrics)
    server.answer = lambda body, number: "I like both."
    learn(rubrics)
    assert rubrics.take_metrics() == {
        "evolving_rubrics/total_active": 2,
        "evolving_rubrics/total_inactive": 0,
        "evolving_rubrics/num_overrides": 1,
        "evolving_rubrics/num_active_rubrics": 2.0,
        "evolving_rubrics/valid_rate": 0.5,
        "evolving_rubrics/skipped": 1,
        "evolving_rubrics/num_new_rubrics": 1.0,
        "evolving_rubrics/avg_gt_rubrics": 1.0,
        "evolving_rubrics/cost": pytest.approx(2 * 0.002),
    }
    assert "evolving_rubrics/valid_rate" not in rubrics.take_metrics()


def test_a_model_that_is_away_changes_nothing(server: JudgeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.answer = lambda body, number: 401
    rubrics = rubrics_of(server)
    learn(rubrics)
    assert rubrics.label(LABEL) is LABEL
    assert rubrics.take_metrics()["evolving_rubrics/skipped"] == 1
    assert "no new criteria for a rubric: the judge answers with HTTP status 401" in caplog.text
    rubrics.close()


def test_a_resumed_run_has_what_was_found(rubrics: EvolvingRubrics, server: JudgeServer) -> None:
    learn(rubrics)
    resumed = rubrics_of(server)
    resumed.load_state_dict(json.loads(json.dumps(rubrics.state_dict())))
    assert resumed.label(LABEL) == rubrics.label(LABEL)
    resumed.close()


def test_what_was_compared_is_kept(server: JudgeServer, tmp_path: Path) -> None:
    rubrics = rubrics_of(server, directory=tmp_path / "kept")
    learn(rubrics, step=7)
    (line,) = (tmp_path / "kept" / "evolving_rubrics_step_000007.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["responses"] == ["By scattering.", "It is not blue."]
    assert [criterion["description"] for criterion in record["new"]] == ["gives an example", "contradicts itself"]
    rubrics.close()


def test_a_directory_that_cannot_be_written_ends_nothing(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    rubrics = rubrics_of(server, directory=tmp_path / "kept")
    learn(rubrics)
    assert len(found_in(rubrics.label(LABEL))) == 3
    rubrics.close()


def test_another_model_may_find_them(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, "openai/a-finder")
    rubrics = rubrics_of(server)
    learn(rubrics)
    assert server.bodies[0]["model"] == "a-finder"
    rubrics.close()


def test_after_the_end_nothing_is_compared(rubrics: EvolvingRubrics) -> None:
    rubrics.close()
    assert rubrics.learn(1, [(LABEL, ["x"])]) is None


@pytest.mark.parametrize(
    ("answer", "criteria"),
    [
        (ANSWER, [GOOD, BAD]),
        (f"<think>{{}}</think>```json\n{ANSWER}\n```", [GOOD, BAD]),
        ('{"positive_rubrics": [], "negative_rubrics": []}', []),
        ('{"positive_rubrics": [{"title": "x"}, "y", {"description": " "}]}', []),
        ('{"positive_rubrics": {"description": "x"}}', []),
        (json.dumps({"negative_rubrics": [{"description": str(n)} for n in range(99)]}), None),
        ('{"rubrics": []}', None),
        ("[]", None),
        ("none", None),
        ("{" * 100_000, None),
    ],
)
def test_answers_are_read(answer: str, criteria: list[Criterion] | None) -> None:
    if "negative_rubrics" in answer and criteria is None:
        criteria = [Criterion(str(n), -1.0) for n in range(5)]
    assert read_new_criteria(answer) == criteria


def test_long_responses_are_shortened() -> None:
    prompt = new_criteria_question("q", ["x" * 100_000, "y" * 100_000], ["c"], max_tokens=1000)
    assert len(prompt) <= 4000
    assert prompt.count("Response ") == 2
