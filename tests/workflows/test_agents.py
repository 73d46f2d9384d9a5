"""Agent programs with a played model, a real server and real processes."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from played_agents import AgentStage, GatheringPolicy, notes, program_in_documents
from played_policy import PlayedPolicy, closing
from rc_fakes import codec

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, GenerationResult, Sample, SamplingConfig
from open_instruct.rollouts.batch_building import training_samples
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.agents.options import AgentOptions
from open_instruct.workflows.agents.protocol import Refused, chat_request, generate_request
from open_instruct.workflows.agents.rollout import cut_behind, verdict_of
from open_instruct.workflows.agents.workflow import AgentPrograms
from open_instruct.workflows.runner import Answer

MakeStage = Callable[..., AgentStage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    with closing(partial(AgentStage, tmp_path)) as make:
        yield make


def text_of(sample: Sample) -> str:
    return codec().decode_all(sample.response_ids.tolist())


def sampled(sample: Sample) -> tuple[list[int], list[float]]:
    assert sample.loss_mask is not None
    return sample.response_ids[sample.loss_mask].tolist(), sample.logprobs[sample.loss_mask].tolist()


def assert_samples_are_what_the_engine_said(result: GenerationResult, one: AgentStage) -> None:
    """Every trained token, with its log-prob, is from a completion of the engine, and every completion is in one sample, once."""
    said = [(c.token_ids.tolist(), c.logprobs.tolist()) for c in one.policy.completions]
    flat = sorted(pair for ids, logprobs in said for pair in zip(ids, logprobs, strict=True))
    assert sorted(pair for sample in result.samples for pair in zip(*sampled(sample), strict=True)) == flat
    for prompt, completion in zip(one.policy.prompts, one.policy.completions, strict=True):
        whole = [*prompt.tolist(), *completion.token_ids.tolist()]
        texts = [[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] for sample in result.samples]
        assert any(text[: len(whole)] == whole for text in texts)


TWO_REQUESTS = """
first = said(generate(ROW["prompt_token_ids"], max_tokens=20, logprobs=1))
second = said(generate(ROW["prompt_token_ids"] + first["token_ids"] + [9, 10, 11], max_tokens=20, logprobs=1))
note(replies=[first, second], row=ROW)
"""


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

BRANCHES = """
ids = ROW["prompt_token_ids"]
a = said(generate(ids, max_tokens=20))["token_ids"]
b = said(generate(ids + [30], max_tokens=20))["token_ids"]
c = said(generate(ids + a + [31], max_tokens=20))["token_ids"]
d = said(generate(ids + a + [32], max_tokens=20))["token_ids"]
print("noise")
print(json.dumps({"reward": 0.25, "metrics": {"turns": 4, "bad": None}}))
"""


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


# --- chat -------------------------------------------------------------------------------------------------------------

TALK = """
messages = list(ROW["messages"])
for turn in range(3):
    choice = said(chat(messages, max_tokens=40, return_token_ids=True, logprobs=True))
    note(choice=choice)
    messages.append(choice["message"])
    messages.append({"role": "user", "content": "And <|end|> now?"})
"""


def test_a_conversation_by_messages_is_never_tokenized_again(stage: MakeStage, tmp_path: Path) -> None:
    """The played model says words in spellings that a tokenizer would not give back."""
    one = stage(TALK, lambda text, _: f"  turn {text.count('now')}  <|user|>x<end>")
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    assert_samples_are_what_the_engine_said(result, one)
    prompts, completions = one.policy.prompts, one.policy.completions
    for before, after, completion in zip(prompts, prompts[1:], completions, strict=False):
        grown = np.concatenate([before, completion.token_ids])
        assert after[: len(grown)].tolist() == grown.tolist()
    for note, completion in zip(notes(tmp_path), completions, strict=True):
        assert note["choice"]["token_ids"] == completion.token_ids.tolist()
        logprobs = [entry["logprob"] for entry in note["choice"]["logprobs"]["content"]]
        assert logprobs == completion.logprobs.tolist()
    assert text_of(sample).count("<|user|>And <|end|> now?<|assistant|>") == 2
    assert sample.loss_mask is not None
    special = codec().tokenizer.convert_tokens_to_ids("<|end|>")
    assert special not in sample.response_ids[~sample.loss_mask].tolist()  # the user's stays text


def test_a_conversation_that_is_changed_becomes_a_further_sample(stage: MakeStage) -> None:
    program = """
    messages = list(ROW["messages"])
    first = said(chat(messages, max_tokens=40))["message"]
    changed = {**first, "content": first["content"].upper()}
    said(chat([*messages, changed, {"role": "user", "content": "go on"}], max_tokens=40))
    said(chat([*messages, first, {"role": "user", "content": "go on"}], max_tokens=40))
    """
    one = stage(program)
    result = one.roll_out(messages=[{"role": "user", "content": "Say <|user|>!"}])
    assert not result.error
    assert_samples_are_what_the_engine_said(result, one)
    changed, whole = result.samples
    special = codec().tokenizer.convert_tokens_to_ids("<|user|>")
    assert [sample.prompt_ids.tolist().count(special) for sample in result.samples] == [2, 1]  # what is said stays text
    assert "HELLO THERE" in codec().decode_all(changed.prompt_ids.tolist())
    assert text_of(whole) == "hello there<|end|><|user|>go on<|assistant|>hello there<|end|>"


TOOLS = """
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}
messages = list(ROW["messages"])
while True:
    choice = said(chat(messages, tools=[TOOL], max_tokens=60))
    note(choice=choice)
    message = choice["message"]
    messages.append({"role": "assistant", "content": message["content"], "refusal": None, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1)}}
        for call in message.get("tool_calls", [])]})
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        answer = str(sum(int(value) for value in arguments.values()))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
print(json.dumps({"reward": 1.0}))
"""


def test_tool_calls_are_parsed_and_answers_follow_in_the_same_sample(stage: MakeStage, tmp_path: Path) -> None:
    def say(text: str, _: int) -> str:
        return "It is 46.<end>" if "<|tool|>" in text else '<|user|>\nCALL add {"a": 12, "b": 34}<end>'

    one = stage(TOOLS, say, tool_parser_type="vllm_played")
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    assert_samples_are_what_the_engine_said(result, one)
    # the control token that the model said is not in the message, which would therefore not give the same tokens again
    assert text_of(sample) == '<|user|>\nCALL add {"a": 12, "b": 34}<|end|><|tool|>46<|assistant|>It is 46.<|end|>'
    first, last = (note["choice"] for note in notes(tmp_path))
    assert (first["finish_reason"], last["finish_reason"]) == ("tool_calls", "stop")
    assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 12, "b": 34}
    assert sample.environment_reward == 1.0


def test_answers_to_calls_in_tags_stand_in_the_models_own_turn(stage: MakeStage) -> None:
    one = stage(TOOLS, lambda text, _: "46<end>" if "<output>" in text else "<add>46</add>")
    result = one.roll_out()
    assert not result.error
    assert text_of(result.samples[0]) == "<add>46</add><output>\n46\n</output>\n46<|end|>"
    assert one.policy.samplings[0].stop == ("</add>",)


DROPS_THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_the_template_drops_thoughts_there_is_a_sample_for_each_turn(stage: MakeStage) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = DROPS_THOUGHTS
    one = stage(TALK, lambda *_: "<think>hm</think>yes<end>", chat=ChatCodec(tokenizer))
    result = one.roll_out()
    assert not result.error
    assert [sample.goes_on for sample in result.samples] == [True, True, False]
    assert "hm" not in codec().decode_all(result.samples[1].prompt_ids.tolist())
    assert_samples_are_what_the_engine_said(result, one)


def test_what_cannot_be_done_is_refused_in_words() -> None:
    sampling = SamplingConfig(temperature=1.0, max_tokens=10)

    def chat_error(**fields: Any) -> str:
        with pytest.raises(Refused) as caught:
            chat_request({"messages": [{"role": "user", "content": "x"}], **fields}, sampling, model="m")
        return str(caught.value)

    def generate_error(**fields: Any) -> str:
        body = {"token_ids": [1], **fields}
        with pytest.raises(Refused) as caught:
            generate_request(body, sampling, model="m", vocab_size=5)
        return str(caught.value)

    assert "stream True: this endpoint can do only False" in chat_error(stream=True)
    assert "this run samples with temperature 1. Leave it out" in chat_error(temperature=0.7)
    assert "n 4: this endpoint can do only 1" in chat_error(n=4)
    assert "reasoning: this endpoint has no such field" in chat_error(reasoning={"effort": "low"})
    assert "neither a text nor a list of parts of text" in chat_error(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    )
    assert "there is no model 'gpt'; the model is m" in chat_error(model="gpt")
    assert "sampling_params.top_k 5" in generate_error(sampling_params={"top_k": 5})
    assert "numbered from 0 to 4" in generate_error(token_ids=[5])
    assert "whole numbers" in generate_error(token_ids=[1.5])
    assert "only the log-prob of the sampled token" in generate_error(sampling_params={"logprobs": 5})
    read = chat_request(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]}
            ],
            "temperature": 1,
            "stream": False,
            "stop": "x",
            "user": "me",
        },
        sampling,
        model="m",
    )
    assert read.messages == [{"role": "user", "content": "ab\ufffd"}]
    assert read.asked.stop == ("x",)


# --- programs that fail -----------------------------------------------------------------------------------------------

FORKS = """
import signal
for number in range(3):
    if os.fork() == 0:
        os.setsid()                 # leaves the session of the program
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            pass                    # loses its parent
        time.sleep(1000)
said(generate(ROW["prompt_token_ids"], max_tokens=20))
note(pid=os.getpid())
time.sleep(1000)
"""


def children_since(before: set[int]) -> list[psutil.Process]:
    alive = psutil.Process().children(recursive=True)
    return [child for child in alive if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE]


def processes_with(text: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and text in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_that_hangs_is_killed_with_all_that_it_has_started(stage: MakeStage) -> None:
    one = stage(FORKS, timeout_s=3.0)
    result = one.roll_out()
    assert result.samples == []
    assert "it ran longer than 3 s (--agent_timeout_s)" in result.error
    wait_until(lambda: not processes_with(str(one.path)))


def test_nothing_is_left_when_the_engine_ends(stage: MakeStage, tmp_path: Path) -> None:
    one = stage(FORKS)
    one.runner.start(one.request(n=2))
    wait_until(lambda: len(notes(tmp_path)) == 2)
    assert len(processes_with(str(one.path))) >= 14  # of each: keeper, program, three children, three of theirs
    one.close()
    wait_until(lambda: not processes_with(str(one.path)))


def test_nothing_is_left_when_the_engine_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "agent_alone.py"
    program.write_text(
        "import os, pathlib, time\n"
        + FORKS.replace('said(generate(ROW["prompt_token_ids"], max_tokens=20))\nnote(pid=os.getpid())', "{}").format(
            f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()"
        )
    )
    words = [sys.executable, "-S", str(program)]
    engine = f"""
import asyncio, os
from open_instruct.workflows.agents.programs import Program

async def main():
    program = await Program.start({words!r}, variables=os.environ, directory="", text="", timeout_s=1000.0)
    await program.wait()

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", engine], cwd=Path(__file__).parents[2])
    try:
        wait_until(lambda: (tmp_path / "begun").exists(), 120.0)
        assert len(processes_with(str(program))) >= 7
    finally:
        process.kill()
        process.wait(20)
    wait_until(lambda: not processes_with(str(program)))


def test_what_a_program_leaves_behind_ends_with_it(stage: MakeStage) -> None:
    one = stage(FORKS.rpartition("time.sleep")[0] + "os._exit(0)")
    result = one.roll_out()
    assert not result.error
    wait_until(lambda: not processes_with(str(one.path)))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("said(generate(ROW['prompt_token_ids']))\nsys.exit(3)", "it ended with code 3"),
        ("said(generate(ROW['prompt_token_ids']))\nos.kill(os.getpid(), 11)", "it ended with code 139"),
        ("said(generate(ROW['prompt_token_ids']))\nraise KeyError('oh')", "KeyError: 'oh'"),
        ("pass", "it ended without a completion"),
    ],
)
def test_a_dying_program_is_begun_again_and_then_given_up_by_name(
    stage: MakeStage, tmp_path: Path, program: str, why: str
) -> None:
    one = stage("note(attempt=1)\n" + program, attempts=3)
    result = one.roll_out()
    assert result.samples == []
    assert why in result.error
    assert str(one.path) in result.error
    assert len(notes(tmp_path)) == 3
    assert not one.errors


def test_an_announced_reward_must_be_there(stage: MakeStage) -> None:
    silent = "said(generate(ROW['prompt_token_ids']))\nprint('fine')"
    assert "--agent_prints_reward" in stage(silent, prints_reward=True).roll_out().error
    [sample] = stage(silent).roll_out().samples
    assert sample.environment_reward is None  # not known, which is not 0
    for line in ('{"reward": "1"}', '{"reward": NaN}', "[1]", '{"score": 1}'):
        assert "--agent_prints_reward" in stage(f"{silent}\nprint({line!r})", prints_reward=True).roll_out().error


def test_after_a_failure_a_rollout_says_the_same(stage: MakeStage, tmp_path: Path) -> None:
    program = TWO_REQUESTS + "if sum(1 for _ in open(os.environ['NOTES'])) == 1: os._exit(1)\n"
    one = stage(program, attempts=2)
    result = one.roll_out()
    assert not result.error
    assert result.notes[0]["num_restarts"] == 1
    seeds = [sampling.seed for sampling in one.policy.samplings]
    assert seeds[:2] == seeds[2:]
    assert len(result.samples) == 1
    first, again = notes(tmp_path)
    assert first["replies"] == again["replies"]


def test_what_a_program_does_not_wait_for_is_not_trained_on(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    import http.client, urllib.parse
    url = urllib.parse.urlsplit(os.environ["OPEN_INSTRUCT_GENERATE_URL"])
    hasty = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"token_ids": ROW["prompt_token_ids"], "sampling_params": {"max_tokens": 20}})
    hasty.request("POST", url.path, body, {"Content-Type": "application/json"})
    while not os.path.exists(os.environ["NOTES"]):
        time.sleep(0.01)
    hasty.close()
    said(generate(ROW["prompt_token_ids"] + [9], max_tokens=20))
    """

    def say(*_: Any) -> str:
        (tmp_path / "notes").touch()
        return "hello there<end>"

    result = stage(program, say, policy=GatheringPolicy).roll_out()
    assert not result.error
    [sample] = result.samples
    assert sample.prompt_ids[-1] == 9
    assert result.notes[0]["num_lost"] == 1


def test_only_so_many_programs_run_at_once(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    note(at=time.monotonic(), change=1)
    said(generate(ROW['prompt_token_ids'], max_tokens=20))
    time.sleep(0.2)
    note(at=time.monotonic(), change=-1)
    """
    one = stage(program, max_concurrent=2)
    result = one.roll_out(n=5)
    assert not result.error
    running = np.cumsum([note["change"] for note in sorted(notes(tmp_path), key=lambda note: note["at"])])
    assert running.max() == 2
    assert max(account["wait_s"] for account in result.notes) > 0.2


def test_output_of_a_program_is_read_to_its_end(stage: MakeStage) -> None:
    program = """
    said(generate(ROW['prompt_token_ids'], max_tokens=20))
    sys.stdout.write("word " * 1000000)
    sys.stderr.write("error " * 100000)
    print()
    print(json.dumps({"reward": 2}))
    """
    [sample] = stage(program).roll_out().samples
    assert sample.environment_reward == 2.0


def test_a_last_line_is_read_only_as_an_object_with_a_reward() -> None:
    assert verdict_of("3") is None
    assert verdict_of('{"score": 3}') is None
    verdict = verdict_of('{"reward": null, "metrics": {"a": 1, "b": true}}')
    assert verdict is not None
    assert (verdict.reward, verdict.metrics) == (None, {"a": 1.0})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "there is no program to start"),
        ({"agent_command": "no_such_program x"}, "there is no program no_such_program. Give one that can be run here"),
        ({"agent_command": "python 'x"}, "it is no command line"),
        ({"agent_command": "python x", "agent_tool_parser_type": "hermes"}, "it must be legacy, dr_tulu or vllm_"),
        ({"agent_command": "python x", "agent_max_samples": 0}, "out of range"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], told: str) -> None:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.config.limits import numbers_are_within_limits

    args = GRPOConfig(model_name_or_path="m", rollout_workflow="agent_program", **options)
    [mistake] = [*AgentPrograms.mistakes(args), *numbers_are_within_limits(args)]
    assert told in mistake
    assert "--agent_" in mistake


def test_lengths_hold_whatever_a_program_asks() -> None:
    from open_instruct.config.grpo_config import GRPOConfig

    args = GRPOConfig(
        model_name_or_path="m",
        rollout_workflow="agent_program",
        agent_command="python x",
        max_prompt_token_length=50,
        response_length=100,
        eval_response_length=300,
        num_samples_per_prompt_rollout=4,
        agent_max_samples=3,
    )
    lengths = args.lengths
    assert (lengths.sequence, lengths.trained, lengths.response, lengths.samples) == (350, 350, 100, 12)


def test_rows_tell_programs_what_they_say() -> None:
    workflow = AgentPrograms(AgentOptions(agent_command="python x"))
    assert workflow.row_facts({"env_config": {"a": [1]}, "tools": [], "environment": None}) == {
        "env_config": {"a": [1]}
    }
    with pytest.raises(ValueError, match="must be JSON"):
        workflow.row_facts({"env_config": {"a": float("nan")}})


def test_metrics_are_listed(stage: MakeStage) -> None:
    from open_instruct.report.metric_names import find

    one = stage(BRANCHES)
    result = one.roll_out(n=2)
    group = ScoredGroup(result, "math", np.zeros(6, np.float32))
    metrics = one.workflow.metrics([group], [])
    assert (metrics["agents/requests"], metrics["agents/samples"], metrics["env/agent/turns"]) == (4.0, 3.0, 4.0)
    assert all(find(name) is not None for name in metrics)


def test_the_program_of_the_documents_runs(stage: MakeStage) -> None:
    """With the `openai` package, as a user has it."""

    def say(text: str, _: int) -> str:
        return "<answer>46</answer><end>" if "<output>" in text else "<calculator>12 + 34</calculator>"

    one = stage("", say, timeout_s=120.0, prints_reward=True)
    one.path.write_text(program_in_documents("my_agent.py"))
    one.workflow.options.agent_command = f"python {one.path}"
    result = one.roll_out(limit_s=120.0)
    assert not result.error
    [sample] = result.samples
    assert text_of(sample) == ("<calculator>12 + 34</calculator><output>\n46\n</output>\n<answer>46</answer><|end|>")
    assert sample.environment_reward == 0.5
    assert result.notes[0]["metrics"] == {"calls": 1.0}
    assert_samples_are_what_the_engine_said(result, one)
