"""What verifiers are asked about a result."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TINY_MODEL
from group_fakes import make_result
from transformers import AutoTokenizer

from open_instruct.data_types import GenerationResult, TokenStatistics
from open_instruct.rollouts.result_scoring import ResultScoring
from open_instruct.scored_groups import Misses, ScoredGroup, UnscoredGroup
from open_instruct.verifiers.row_verifiers import SEPARATOR
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.workflows.single_turn import SingleTurn

TOKENIZER: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
FIELDS: dict[str, Any] = {
    "index": 0,
    "prompt_id": "train-0",
    "issue_version": 1,
    "engine_id": 0,
    "token_statistics": TokenStatistics(0, 0, 0.0, 0.0),
}
ROW = SimpleNamespace(dataset="passthrough", ground_truth="-", raw_query="?")


class Asked:
    """Verifiers that keep what they are asked."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []
        self.token_ids: list[list[list[int]]] = []

    def submit(self, name: str, truth: object, token_ids: list[list[int]], texts: list[str], query: str) -> Future:
        self.texts.append(texts)
        self.token_ids.append(token_ids)
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done


@pytest.fixture
def result() -> GenerationResult:
    responses = [np.array(TOKENIZER.encode(text), np.int32) for text in ("12 + 34", "46")]
    spans = [[(1, len(ids))] for ids in responses]
    logprobs = [np.zeros(len(ids), np.float32) for ids in responses]
    return make_result(
        responses=responses, logprobs=logprobs, finish_reasons=["stop"] * 2, version_spans=spans, **FIELDS
    )


def ask(result: GenerationResult, monkeypatch: pytest.MonkeyPatch) -> Asked:
    verifiers: Any = Asked()
    scoring = ResultScoring(SimpleNamespace(), SingleTurn(None), TOKENIZER, verifiers)  # type: ignore[arg-type]
    monkeypatch.setattr(scoring, "_row", lambda _: ROW)
    scoring.submit(result, lambda futures, seconds: None)
    return verifiers


def test_verifier_reads_judged_samples_from_where_the_answer_begins(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = result.samples
    samples = [replace(first, answer_start=len(first.response_ids) - 1), replace(second, is_judged=False)]
    asked = ask(replace(result, samples=samples), monkeypatch)
    assert asked.token_ids == [[first.response_ids[-1:].tolist()]]
    assert asked.texts == [TOKENIZER.batch_decode([first.response_ids[-1:]])]


def test_verifier_does_not_read_what_a_tool_said_last(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that had no room for a further turn ends with a tool's answer, which may be the right one."""
    first, second = result.samples
    said = np.append(first.response_ids, second.response_ids)
    mask = np.arange(len(said)) < len(first.response_ids)
    asked = ask(replace(result, samples=[replace(first, response_ids=said, loss_mask=mask)]), monkeypatch)
    assert asked.texts == [["12 + 34"]]
    nothing = replace(first, response_ids=said, loss_mask=np.zeros(len(said), bool))
    assert ask(replace(result, samples=[nothing]), monkeypatch).texts == [[""]]


def test_a_result_without_a_judged_sample_has_no_text(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(replace(result, samples=[replace(sample, is_judged=False) for sample in result.samples]), monkeypatch)
    assert (asked.token_ids, asked.texts) == ([[]], [[]])


def test_each_of_several_verifiers_is_told_of_whole_conversations(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first conversation has two samples, of which verifiers see the last."""
    first, second = result.samples
    samples = [replace(first, goes_on=True, is_judged=False), first, second]
    verifiers: Any = Asked()
    scoring = ResultScoring(SimpleNamespace(), SingleTurn(None), TOKENIZER, verifiers)  # type: ignore[arg-type]
    monkeypatch.setattr(scoring, "_names_and_weights", lambda _: (["math", "max_length"], [1.0, 3.0]))
    monkeypatch.setattr(scoring, "_dataset_of", lambda _: "math")
    scored_by = [[Scored(1.0), Scored(0.0)], [Scored(0.5), Scored(0.25)]]
    group = scoring.scored_group(replace(result, samples=samples), scored_by, 0.0)
    assert isinstance(group, ScoredGroup)
    assert [(part.name, part.scores.tolist()) for part in group.parts] == [
        ("math", [1.0, 1.0, 0.0]),
        ("max_length", [0.5, 0.5, 0.25]),
    ]
    unjudged = replace(second, is_judged=False, reward=0.0)
    group = scoring.scored_group(replace(result, samples=[first, unjudged]), [one[:1] for one in scored_by], 0.0)
    assert isinstance(group, ScoredGroup)
    assert group.parts == ()


class Compared:
    """Rubrics that keep what they are to compare."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def learn(self, training_step: int, groups: list[Any]) -> None:
        self.groups += groups

    def take_metrics(self) -> dict[str, float]:
        return {}


class LastWord(SingleTurn):
    def answer(self, text: str) -> str:
        return text.rpartition(" ")[2]


def test_rubrics_are_learned_from_what_verifiers_read(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From answers as the workflow has them, without what a tool said and without samples that nobody judges."""
    first, second = result.samples
    said = np.append(first.response_ids, second.response_ids)
    with_tool = replace(first, response_ids=said, loss_mask=np.arange(len(said)) < len(first.response_ids))
    samples = [with_tool, second, replace(second, is_judged=False)]
    rubrics: Any = Compared()
    verifiers: Any = Asked()
    scoring = ResultScoring(SimpleNamespace(), LastWord(None), TOKENIZER, verifiers, rubrics=rubrics)  # type: ignore[arg-type]
    row = SimpleNamespace(dataset="rubric", ground_truth="a rubric", raw_query="?")
    monkeypatch.setattr(scoring, "_row", lambda _: row)
    monkeypatch.setattr(rubrics, "label", lambda label: label, raising=False)
    result = replace(result, samples=samples)
    scoring.submit(result, lambda futures, seconds: None)
    groups: list[Any] = [SimpleNamespace(result=result, samples=samples)]
    assert scoring.learn_rubrics(1, groups) == {}
    assert rubrics.groups == [("a rubric", ["34", "46"])] == [("a rubric", verifiers.texts[0])]
    nobody: list[Any] = [SimpleNamespace(result=result, samples=samples[2:])]
    scoring.learn_rubrics(2, nobody)
    assert len(rubrics.groups) == 1


def scored_group(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch, dataset: str, *scored_by: list[Scored]
) -> ScoredGroup | UnscoredGroup:
    scoring = ResultScoring(SimpleNamespace(), SingleTurn(None), TOKENIZER, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(scoring, "_dataset_of", lambda _: dataset)
    return scoring.scored_group(result, scored_by, 0.0)


def test_each_verifier_says_what_it_did_not_score(result: GenerationResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five responses the first verifier scores all but two, the second all but one of these and another one."""
    result = replace(result, samples=[result.samples[0]] * 5)
    timeout, error = Scored(None, "timeout"), Scored(None, "error: no")
    math = [timeout, Scored(1.0, cost=0.5), error, Scored(0.0), Scored(1.0)]
    length = [error, error, Scored(1.0), Scored(1.0, cost=0.25), Scored(0.0)]
    group = scored_group(result, monkeypatch, f"math{SEPARATOR}max_length", math, length)
    assert isinstance(group, ScoredGroup)
    assert group.misses == (Misses("math", 2, 1), Misses("max_length", 2, 2))
    assert (group.num_not_scored, group.num_failures, group.cost, len(group.samples)) == (3, 3, 0.75, 2)


def test_response_without_a_peer_that_is_left_out_was_scored(
    result: GenerationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of two; the second response of the first group is not scored, so the first has no peer."""
    samples = [replace(result.samples[0], group=group) for group in (0, 0, 1, 1)]
    scores = [Scored(1.0), Scored(None, "timeout"), Scored(0.0), Scored(1.0)]
    group = scored_group(replace(result, samples=samples), monkeypatch, "math", scores)
    assert isinstance(group, ScoredGroup)
    assert (len(group.samples), group.num_not_scored, group.misses) == (2, 1, (Misses("math", 1, 0),))
