# ruff: noqa: F811 - `stage` is a fixture
"""A client that asks again while its first request still runs, and stop strings that spell control tokens."""

from functools import partial

import numpy as np
import pytest
from played_agents import GatheringPolicy, MakeStage, stage, text_of  # noqa: F401 - `stage` is a fixture
from played_policy import vllm_parser
from rc_fakes import codec
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, SamplingConfig
from open_instruct.workflows.agents.branches import Branches
from open_instruct.workflows.agents.chat import Chat
from open_instruct.workflows.agents.protocol import chat_request
from open_instruct.workflows.conversations.bridge import Bridge

ASKS_TWICE = """
messages = list(ROW["messages"])
first = said(chat(messages, max_tokens=20))["message"]
messages += [first, {"role": "user", "content": "go on"}]
body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 20}).encode()
request = urllib.request.Request(BASE + "/chat/completions", body, {"Content-Type": "application/json"})
try:
    urllib.request.urlopen(request, timeout=0.5)
    sys.exit("there was a reply")
except TimeoutError:
    pass
said(chat(messages, max_tokens=20))
"""


def test_a_request_that_is_sent_again_goes_on_in_the_same_sample(stage: MakeStage) -> None:
    """The model says words in spellings that a tokenizer would not give back."""
    one = stage(ASKS_TWICE, lambda *_: "  hello  <|user|>x<end>", policy=partial(GatheringPolicy, after=1))
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    assert text_of(sample) == "  hello  <|user|>x<|end|><|user|>go on<|assistant|>  hello  <|user|>x<|end|>"
    [account] = result.notes
    assert (account["num_lost"], account["num_samples"]) == (1, 1)
    prompts, completions = one.policy.prompts, one.policy.completions
    grown = np.concatenate([prompts[0], completions[0].token_ids])
    assert all(prompt[: len(grown)].tolist() == grown.tolist() for prompt in prompts[1:])
    sampled = np.concatenate([completions[0].token_ids, completions[2].token_ids])
    assert sample.loss_mask is not None
    assert sample.response_ids[sample.loss_mask].tolist() == sampled.tolist()


def said(*token_ids: int) -> Completion:
    ids = np.array(token_ids, np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), "stop", [(0, len(ids))])


@pytest.mark.parametrize("first_is_lost", [True, False])
def test_tokens_that_two_samples_have_in_common_are_trained_on_once(*, first_is_lost: bool) -> None:
    branches = Branches()
    branch = branches.grow(None, [1, 2], said(3, 4), number=0, talk=None).branch
    branch.is_busy = True
    copy = branches.continued(branches.begun_by([1, 2, 3, 4, 5]))
    assert copy is not None
    assert copy is not branch
    branch.is_busy = False
    first = branches.grow(branch, [1, 2, 3, 4, 5], said(6), number=1, talk=None)
    if first_is_lost:
        branches.take_back(first, 1)
    branches.grow(copy, [1, 2, 3, 4, 5], said(7, 8), number=2, talk=None)
    samples = branches.samples(finish_reason=None, reward=1.0)
    last = samples[-1]
    assert (last.goes_on, last.is_judged) == (False, True)
    if first_is_lost:
        assert len(samples) == 1
        assert (last.prompt_ids.tolist(), last.response_ids.tolist()) == ([1, 2], [3, 4, 5, 7, 8])
    else:
        assert [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in samples] == [
            ([1, 2], [3, 4, 5, 6]),
            ([1, 2, 3, 4, 5], [7, 8]),
        ]
    trained = np.concatenate([one.response_ids[one.loss_mask] for one in samples if one.loss_mask is not None])
    assert sorted(trained.tolist()) == ([3, 4, 7, 8] if first_is_lost else [3, 4, 6, 7, 8])
    assert branches.num_response_tokens == (5 if first_is_lost else 7)


@pytest.mark.parametrize(
    ("text", "stop", "keeps", "content"),
    [
        ("one<|done|>two", ["<|done|>"], False, "one"),
        ("one<|done|>two", ["<|done|>"], True, "one"),  # content is the text without control tokens
        ("one x<|done|>y two", ["x<|done|>y"], False, "one "),
        ("one two three", ["wo"], False, "one t"),
        ("one two three", ["wo"], True, "one two"),
        ("one two", ["<|done|>"], False, "one two"),
    ],
)
def test_a_stop_string_may_spell_control_tokens(text: str, stop: list[str], content: str, *, keeps: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    chat_codec = ChatCodec(tokenizer)
    chat = Chat(chat_codec, Bridge(chat_codec), "legacy", vllm_parser)
    body = {"messages": [{"role": "user", "content": "x"}], "stop": stop, "include_stop_str_in_output": keeps}
    request = chat_request(body, SamplingConfig(), model="m")
    message, _ = chat.answered(request, said(*chat_codec.encode(text)), 0)
    assert message["content"] == content
