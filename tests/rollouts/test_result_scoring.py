"""What verifiers are asked about a result."""

from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TINY_MODEL
from group_fakes import make_result
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, GenerationResult, Sample, TokenStatistics
from open_instruct.rollouts.result_scoring import ResultScoring
from open_instruct.scored_groups import Misses, ScoredGroup, UnscoredGroup
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import score_response
from open_instruct.verifiers.row_verifiers import SEPARATOR
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.verifiers.text_verifiers import PassthroughVerifier
from open_instruct.workflows.conversations.ledger import Ledger
from open_instruct.workflows.rc.prompts import answer_of
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
        self.queries: list[list[str]] = []

    def submit(
        self, name: str, truth: object, token_ids: list[list[int]], texts: list[str], queries: list[str]
    ) -> Future:
        self.texts.append(texts)
        self.token_ids.append(token_ids)
        self.queries.append(queries)
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


# --- tags that a tokenizer marks as special ---------------------------------------------------------------------------

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<finish>", "</finish>"]


@pytest.fixture
def with_special_tags() -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*TAGS, "<solution>", "</solution>", "<|turn|>"]})
    assert len(tokenizer.encode("<answer>")) == 1
    return tokenizer


class OnlyRow:
    """Requests with one row."""

    def __init__(self, dataset: str, ground_truth: object, raw_query: str = "?") -> None:
        self.train = self
        self._row = SimpleNamespace(dataset=dataset, ground_truth=ground_truth, raw_query=raw_query)

    def __getitem__(self, index: int) -> Any:
        return self._row

    def dataset_of(self, index: int) -> str:
        return self._row.dataset


def responses_of(tokenizer: Any, *texts: str) -> GenerationResult:
    responses = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    return make_result(
        responses=responses,
        logprobs=[np.zeros(len(ids), np.float32) for ids in responses],
        finish_reasons=["stop"] * len(texts),
        version_spans=[[(1, len(ids))] for ids in responses],
        **FIELDS,
    )


@pytest.mark.parametrize(
    ("dataset", "right", "wrong"),
    [
        ("string_matcher", "<think>4</think> <answer>46</answer>", "<answer>4</answer>"),
        ("puzzle", "<think>12 + 34</think> 46", "<think>46</think> 4"),
        ("re_search", "<finish>46</finish>", "46"),
    ],
)
def test_verifiers_see_tags_that_the_tokenizer_marks_as_special(
    with_special_tags: Any, dataset: str, right: str, wrong: str
) -> None:
    verifiers: Any = Asked()
    requests: Any = OnlyRow(dataset, "46")
    scoring = ResultScoring(requests, SingleTurn(None), with_special_tags, verifiers)
    end = f"{with_special_tags.eos_token}<|turn|>"
    scoring.submit(responses_of(with_special_tags, right + end, wrong + end), lambda futures, seconds: None)
    ((first, second),) = verifiers.texts
    assert "<|turn|>" not in first
    assert with_special_tags.eos_token not in first
    scores = [score_response(dataset, "46", [], text).score for text in (first, second)]
    assert scores == [1.0, 0.0]


def test_verifier_of_a_user_names_its_own_tags(with_special_tags: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers: Any = Asked()
    requests: Any = OnlyRow("passthrough", "-")
    result = responses_of(with_special_tags, "<solution>46</solution>")
    ResultScoring(requests, SingleTurn(None), with_special_tags, verifiers).submit(result, lambda *_: None)
    monkeypatch.setattr(PassthroughVerifier, "tags", ("<solution>", "</solution>"))
    ResultScoring(requests, SingleTurn(None), with_special_tags, verifiers).submit(result, lambda *_: None)
    without, with_tags = verifiers.texts
    assert (without[0].strip(), with_tags) == ("46", ["<solution>46</solution>"])


def test_tags_are_text_for_conversations_agents_and_the_reasoning_cache(with_special_tags: Any) -> None:
    """All three read a turn with `decode`, and take the last token for the end of the turn if it is a control token."""
    codec = ChatCodec(with_special_tags)
    turn = "<think>12</think><answer>46</answer>"
    ids = codec.encode(turn + "<|turn|>" + with_special_tags.eos_token)
    assert codec.decode(ids) == turn
    assert answer_of(codec.decode(ids)) == "<answer>46</answer>"
    assert [codec.control_token(token_id) for token_id in codec.encode(turn) if codec.control_token(token_id)] == []
    assert codec.control_token(with_special_tags.eos_token_id) == with_special_tags.eos_token


def test_tag_that_ends_texts_is_no_text(with_special_tags: Any) -> None:
    with_special_tags.eos_token = "</answer>"
    assert ChatCodec(with_special_tags).decode(with_special_tags.encode("<answer>46</answer>")) == "<answer>46"


def test_form_is_looked_for_in_what_the_policy_said() -> None:
    """A tool that prints the form earns nothing, and a form around a tool's answer is none."""
    codec = ChatCodec(TOKENIZER)

    def is_well_formed(*parts: tuple[str, bool]) -> bool:
        ids = [codec.encode(text) for text, _ in parts]
        mask = np.concatenate([np.full(len(part), own) for part, (_, own) in zip(ids, parts, strict=True)])
        (sample,) = responses_of(TOKENIZER, "".join(text for text, _ in parts)).samples
        sample = replace(sample, response_ids=np.concatenate(ids).astype(np.int32), loss_mask=mask)
        result = replace(responses_of(TOKENIZER, "46"), samples=[sample])
        requests: Any = OnlyRow("passthrough", "-")
        scoring = ResultScoring(requests, SingleTurn(None), TOKENIZER, Asked(), looks_at_form=True)  # type: ignore[arg-type]
        (is_formed,) = scoring.group(result, np.zeros(1, np.float32)).well_formed  # type: ignore[misc]
        return bool(is_formed)

    form = "<think>a</think> <answer>46</answer>"
    assert is_well_formed((form, True))
    assert is_well_formed(("call", True), ("result", False), (form, True))
    assert is_well_formed(("result", False), (form, True))
    assert not is_well_formed(("call", True), (form, False), ("46", True))
    assert not is_well_formed((form, False))
    assert not is_well_formed(("<think>a</think>", True), ("result", False), ("<answer>46</answer>", True))


# --- thoughts that are open where an answer begins --------------------------------------------------------------------

OPENED, CLOSED = "User: ?\nAssistant: <think>", "User: ?\nAssistant:"
CALL, OUTPUT = "<search>x</search>", "<output>\ny\n</output>\n"
NEXT_TURN = "<|tool|>y<|end|><|assistant|>"


def talk(prompt: str, *texts: str) -> Sample:
    """A conversation in which the policy speaks first, and then alternates with a tool."""
    codec = ChatCodec(TOKENIZER)
    ledger = Ledger(codec.encode(prompt))
    for position, text in enumerate(texts):
        ids = np.array(codec.encode(text), np.int32)
        if position % 2:
            ledger.inserted(ids.tolist())
        else:
            ledger.sampled(Completion(ids, np.zeros(len(ids), np.float32), "stop", [(1, len(ids))]))
    return ledger.sample(finish_reason="stop")


@pytest.mark.parametrize(
    ("sample", "row_prompt", "expected"),
    [
        (talk(OPENED, f"I look it up.</think>{CALL}", OUTPUT, "So <answer>42</answer>"), OPENED, 1),
        (talk(OPENED, f"I look it up.{CALL}", OUTPUT, "So <answer>42</answer>"), OPENED, 0),
        (talk(OPENED, f"I look it up.{CALL}", OUTPUT, "yes</think> So <answer>42</answer>"), OPENED, 1),
        (talk(CLOSED, f"<think>I look.{CALL}", OUTPUT, "So <answer>42</answer>"), CLOSED, 0),
        (talk(CLOSED, f"I look.{CALL}", OUTPUT, "So <answer>42</answer>"), CLOSED, 1),
        (talk(CLOSED, f"<think>I look.<|end|>{CALL}<|end|>", NEXT_TURN, "<answer>42</answer>"), CLOSED, 1),
        (talk(OPENED, f"a</think>{CALL}<|end|>", f"{NEXT_TURN}<think>\n", "<answer>42</answer>"), OPENED, 0),
        (talk(OPENED, f"a</think>{CALL}<|end|>", f"{NEXT_TURN}<think>\n", "b</think><answer>42</answer>"), OPENED, 1),
        (talk(CLOSED, "<answer>42</answer>"), OPENED, 1),
        (talk(f"{OPENED}\n", "<answer>42</answer>"), CLOSED, 0),
        (talk(OPENED, "<answer>42</answer>"), OPENED, 0),
    ],
)
def test_the_tokens_in_front_of_an_answer_say_whether_thoughts_are_open(
    sample: Sample, row_prompt: str, expected: float
) -> None:
    verifiers: Any = Asked()
    requests: Any = OnlyRow("string_matcher", "42", row_prompt)
    result = replace(responses_of(TOKENIZER, "46"), samples=[sample])
    ResultScoring(requests, SingleTurn(None), TOKENIZER, verifiers).submit(result, lambda *_: None)
    [[text]], [[query]] = verifiers.texts, verifiers.queries
    assert score_response("string_matcher", "42", [], text, query).score == expected
    assert query.startswith(CLOSED)


def test_each_response_of_a_group_has_its_own_prompt() -> None:
    """The pool hands each verifier call the prompt of its own response."""
    samples = [talk(OPENED, "<answer>42</answer>"), talk(CLOSED, "<answer>42</answer>")]
    requests: Any = OnlyRow("string_matcher", "42", OPENED)
    result = replace(responses_of(TOKENIZER, "46"), samples=samples)
    with closing(VerifierPool(1, 20.0)) as pool:
        scoring = ResultScoring(requests, SingleTurn(None), TOKENIZER, pool)
        scores: Future[list[float | None]] = Future()
        scoring.submit(result, lambda pending, _: scores.set_result([one.score for one in pending.results()[0][0]]))
        assert scores.result(60) == [0.0, 1.0]
