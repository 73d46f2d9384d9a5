# ruff: noqa: F811 - `stage` is a fixture
"""Agent programs with a played model, a real server and real processes."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from played_agents import (  # noqa: F401 - `stage` is a fixture
    BRANCHES,
    TWO_REQUESTS,
    GatheringPolicy,
    MakeStage,
    assert_samples_are_what_the_engine_said,
    notes,
    sampled,
    stage,
)
from played_policy import PlayedPolicy
from rc_fakes import codec

from open_instruct.data_types import Completion, SamplingConfig
from open_instruct.rollouts.training_samples import training_samples
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.agents.rollout import cut_behind
from open_instruct.workflows.runner import Answer


def test_exact_ids_and_logprobs_of_generate_end_in_the_sample(stage: MakeStage, tmp_path: Path) -> None:
    one = stage(TWO_REQUESTS)
    result = one.roll_out()
    assert not result.error
    [sample], [note] = result.samples, notes(tmp_path)
    assert_samples_are_what_the_engine_said(result, one)
    ids = [choice["token_ids"] for choice in note["replies"]]
    assert sampled(sample)[0] == ids[0] + ids[1]
    content = [entry for choice in note["replies"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids[0] + ids[1]]
    assert [entry["logprob"] for entry in content] == sampled(sample)[1]
    assert [choice["version_spans"] for choice in note["replies"]] == [[[0, len(some)]] for some in ids]
    assert sample.response_ids.tolist() == [*ids[0], 9, 10, 11, *ids[1]]
    assert sample.answer_start == len(ids[0]) + 3
    assert (sample.finish_reason, sample.environment_reward, sample.is_judged) == ("stop", None, True)


def test_each_token_has_the_version_that_sampled_it(stage: MakeStage, tmp_path: Path) -> None:
    def say(*_: Any) -> str:
        one.policy.version += 1
        return "hello<end>"

    one = stage(TWO_REQUESTS, say)
    [sample] = one.roll_out().samples
    length = len(one.policy.completions[0].token_ids)
    assert sample.version_spans == [(1, length + 3), (2, len(one.policy.completions[1].token_ids))]
    assert [choice["version_spans"][0][0] for choice in notes(tmp_path)[0]["replies"]] == [1, 2]


def test_the_program_finds_the_row_and_no_ground_truth_unless_asked(stage: MakeStage, tmp_path: Path) -> None:
    program = TWO_REQUESTS + "note(key=os.environ['OPENAI_API_KEY'], base=BASE)\n"
    one = stage(program)
    result = one.roll_out(n=2, env_config={"level": 3})
    assert not result.error
    assert len({sampling.seed for sampling in one.policy.samplings}) == 4
    rows = sorted((note["row"] for note in notes(tmp_path) if "row" in note), key=lambda row: row["rollout"])
    assert [row["rollout"] for row in rows] == [0, 1]
    for row in rows:
        assert row["messages"] == [{"role": "user", "content": "12 + 34 ="}]
        assert (row["seed"], row["env_config"], row["is_eval"]) == (7, {"level": 3}, False)
        assert "ground_truth" not in row
    keys = {note["key"] for note in notes(tmp_path) if "key" in note}
    assert len(keys) == 2  # each rollout is a session of its own
    (tmp_path / "notes").unlink()
    stage(TWO_REQUESTS, gets_ground_truth=True).roll_out()
    assert notes(tmp_path)[0]["row"]["ground_truth"] == "46"


PARALLEL = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as threads:
    both = list(threads.map(lambda last: said(generate(ROW["prompt_token_ids"] + [last], max_tokens=30)), [20, 21]))
third = said(generate(ROW["prompt_token_ids"] + [20] + both[0]["token_ids"] + [5], max_tokens=30))
note(both=both)
"""


def test_two_requests_at_once_are_both_answered_and_become_two_samples(stage: MakeStage) -> None:
    one = stage(PARALLEL, lambda text, _: f"{len(text)}<end>", policy=GatheringPolicy)
    result = one.roll_out()
    assert not result.error
    assert_samples_are_what_the_engine_said(result, one)
    other, last = result.samples
    assert (other.goes_on, last.goes_on) == (True, False)
    assert (other.prompt_ids[-1], last.prompt_ids[-1]) == (21, 20)
    assert last.loss_mask is not None
    assert int((~last.loss_mask).sum()) == 1
    seeds = {sampling.seed for sampling in one.policy.samplings}
    assert len(seeds) == 3


def test_of_two_requests_at_once_that_go_on_at_one_place_the_second_begins_a_further_sample(stage: MakeStage) -> None:
    program = """
    from concurrent.futures import ThreadPoolExecutor
    ids = ROW["prompt_token_ids"]
    ids = ids + said(generate(ids, max_tokens=30))["token_ids"]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda last: said(generate(ids + [last], max_tokens=30)), [20, 21]))
    """
    one = stage(program, policy=lambda say, chat: GatheringPolicy(say, chat, after=1))
    result = one.roll_out()
    assert not result.error
    assert_samples_are_what_the_engine_said(result, one)
    assert sorted(len(sample.prompt_ids) - len(one.policy.prompts[0]) for sample in result.samples) == [
        0,
        len(one.policy.completions[0].token_ids) + 1,
    ]


def test_a_request_that_needs_what_another_may_take_waits_for_it(stage: MakeStage) -> None:
    """Both may have all that is left, 12 tokens; the first takes some, so the second gets the others."""

    class Slow(PlayedPolicy):
        """Long enough that the second request is there before the first is answered."""

        def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
            answer, late = super().submit(request_id, prompt_ids, sampling), Future[Answer]()
            threading.Timer(1.0, lambda: late.set_result(answer.result())).start()
            return late

    program = PARALLEL.replace(", max_tokens=30", "").partition("third")[0]
    one = stage(program, lambda *_: "abcde<end>", policy=Slow)
    result = one.roll_out(max_tokens=12)
    assert not result.error
    num_first = len(one.policy.completions[0].token_ids)
    assert 0 < num_first < 12
    assert [sampling.max_tokens for sampling in one.policy.samplings] == [12, 12 - num_first]
    assert sum(len(sample.response_ids) for sample in result.samples) <= 12


# --- samples ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_nowhere_begins_a_further_sample(stage: MakeStage) -> None:
    one = stage(BRANCHES)
    result = one.roll_out(n=2)
    assert not result.error
    assert_samples_are_what_the_engine_said(result, one)
    assert [sample.goes_on for sample in result.samples] == [True, True, False] * 2
    assert {sample.environment_reward for sample in result.samples} == {0.25}
    begins = one.request().prompt.tolist()
    heads = [sample.prompt_ids.tolist()[len(begins) :] for sample in result.samples[:3]]
    spoken = one.policy.completions[0].token_ids.tolist()
    assert heads == [[30], [], [*spoken, 32]]  # in the order of their last requests
    assert result.notes[0]["metrics"] == {"turns": 4.0}
    assert result.notes[0]["num_samples"] == 3


def test_samples_of_a_rollout_share_reward_and_advantage_and_count_once(stage: MakeStage) -> None:
    one = stage(BRANCHES)
    result = one.roll_out(n=2)
    scores = [None, None, 1.0, None, None, 0.0]
    rewards = one.workflow.rewards(result.samples, scores)
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    group = ScoredGroup(result, "math", np.array(rewards, np.float32))
    seen = []

    def advantages(rewards_G: np.ndarray, *, lengths_G: np.ndarray) -> np.ndarray:
        seen.append(rewards_G.tolist())
        return rewards_G - rewards_G.mean()

    trained = training_samples(
        [group], verification_reward=1.0, advantages=advantages, mask_truncated_completions=False
    )
    assert seen == [[1.25, 0.25]]  # two rollouts, although there are six samples
    assert [sample.advantage for sample in trained] == [0.5] * 3 + [-0.5] * 3
    [measured] = one.workflow.evaluated([group])
    assert measured.scores.tolist() == [1.0, 0.0]


def test_no_more_samples_than_the_option_says(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    for last in range(5):
        status, body = generate(ROW["prompt_token_ids"] + [last], max_tokens=20)
        note(status=status, error=body.get("error"))
    """
    result = stage(program, max_samples=2).roll_out()
    assert not result.error
    assert len(result.samples) == 2
    assert [note["status"] for note in notes(tmp_path)] == [200, 200, 400, 400, 400]
    assert "--agent_max_samples" in notes(tmp_path)[2]["error"]["message"]
    assert result.samples[-1].finish_reason == "length"


# --- limits -----------------------------------------------------------------------------------------------------------

GREEDY = """
ids = ROW["prompt_token_ids"]
while True:
    status, body = generate(ids)
    note(status=status, error=body.get("error"))
    if status != 200:
        sys.exit(5)
    ids = ids + body["choices"][0]["token_ids"] + [7]
"""


def test_response_length_bounds_a_rollout_and_is_no_failure(stage: MakeStage, tmp_path: Path) -> None:
    one = stage(GREEDY, lambda *_: "one two three<end>")
    result = one.roll_out(max_tokens=40)
    assert not result.error  # although the program ended with code 5
    [sample] = result.samples
    assert len(sample.response_ids) <= 40
    assert sample.finish_reason == "length"
    assert result.notes[0]["at_limit"]
    error = notes(tmp_path)[-1]["error"]
    assert error["code"] == "limit_reached"
    assert "40 tokens in all (--response_length)" in error["message"]


def test_the_engines_context_bounds_a_request(stage: MakeStage, tmp_path: Path) -> None:
    result = stage(GREEDY, lambda *_: "one two three<end>", max_model_len=40).roll_out(max_tokens=500)
    assert not result.error
    assert len(result.samples[0].prompt_ids) + len(result.samples[0].response_ids) <= 40
    assert "--max_prompt_token_length" in notes(tmp_path)[-1]["error"]["message"]
    nothing = stage("status, body = generate([5] * 100)\nsys.exit(status != 400)", max_model_len=40).roll_out()
    assert "the first request had no room" in nothing.error


def test_after_a_stop_token_nothing_counts(stage: MakeStage) -> None:
    end = codec().encode("there")[0]
    program = f"note(choice=said(generate(ROW['prompt_token_ids'], stop_token_ids=[{end}])))"
    [sample] = stage(program).roll_out().samples
    assert sample.response_ids[-1] == end
    assert (sample.finish_reason, len(sample.version_spans)) == ("stop", 1)
    said = Completion(np.arange(6, dtype=np.int32), np.zeros(6, np.float32), "length", [(1, 2), (2, 4)])
    assert cut_behind(said, frozenset({2})).version_spans == [(1, 2), (2, 1)]
    assert cut_behind(said, frozenset({1})).version_spans == [(1, 2)]
    assert cut_behind(said, frozenset({9})) is said


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_request_needs_a_session(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    secret = os.environ["OPENAI_API_KEY"]
    root = BASE.partition("/s/")[0]
    body = {"token_ids": ROW["prompt_token_ids"], "sampling_params": {"max_tokens": 5}}
    path = "/inference/v1/generate"
    note(name="none", reply=post(root + path, body))
    note(name="wrong", reply=post(root + "/s/" + "0" * 32 + path, body, {"X-Session-ID": secret}))
    note(name="header", reply=post(root + path, body, {"X-Session-ID": secret}))
    note(name="wrong header", reply=post(root + path, body, {"X-Session-ID": "me"}))
    note(name="other header", reply=post(root + f"/s/{secret}" + path, body, {"X-Session-ID": "me"}))
    note(name="bearer", reply=post(root + path, body, {"Authorization": "Bearer " + secret}))
    note(name="path", reply=post(BASE + "/embeddings", body))
    note(name="json", reply=post(root + f"/s/{secret}" + path, None, data=b"{"))
    with urllib.request.urlopen(BASE + "/models") as reply:
        note(name="models", reply=[reply.status, json.loads(reply.read())])
    """
    result = stage(program, max_model_len=777).roll_out()
    assert not result.error
    replies = {note["name"]: note["reply"] for note in notes(tmp_path)}
    statuses = {name: reply[0] for name, reply in replies.items()}
    assert {name for name, status in statuses.items() if status == 401} == {"none", "wrong", "wrong header"}
    assert {name for name, status in statuses.items() if status == 200} == {
        "header",
        "other header",
        "bearer",
        "models",
    }
    assert (statuses["path"], statuses["json"]) == (404, 400)
    assert replies["models"][1]["data"][0]["max_model_len"] == 777
    assert len(result.samples) == 3


def test_a_session_ends_with_its_rollout(stage: MakeStage, tmp_path: Path) -> None:
    one = stage("said(generate(ROW['prompt_token_ids']))\nnote(base=BASE)")
    one.roll_out()
    [first] = notes(tmp_path)
    other = stage("said(generate(ROW['prompt_token_ids']))\nnote(base=BASE)")
    other.roll_out()
    again = stage(
        f"""
        said(generate(ROW['prompt_token_ids']))
        old = {first["base"]!r}
        try:
            note(status=post(old + "/chat/completions", {{"messages": []}})[0])
        except OSError as error:
            note(status=repr(error))
        """
    )
    again.roll_out()
    assert notes(tmp_path)[-1]["status"] == 401
