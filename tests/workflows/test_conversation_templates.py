"""Conversations over chat templates that change, leave out or end what was said in ways of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_policy import Say, Stage, closing
from rc_fakes import codec
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_templates import chat_template
from open_instruct.environments.base import ENVIRONMENTS, user_message
from open_instruct.workflows.conversations.bridge import Bridge
from open_instruct.workflows.conversations.options import ConversationOptions
from open_instruct.workflows.conversations.workflow import Conversations

MakeTalk = Callable[..., Stage]
AFTER_THE_LAST_QUESTION = (  # as Qwen3 has it: thoughts stay until the user says something again
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_ENDS = (  # as Command R7B has it: two control tokens end a turn
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|done|><|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKS_ON = """
from open_instruct.environments.base import ENVIRONMENTS, Environment, Observation, Opening, user_message

@ENVIRONMENTS.register("asks_on")
class AsksOn(Environment):
    takes_text = True
    num_turns = 0

    async def reset(self, task, seed):
        return Opening()

    async def step(self, turn):
        self.num_turns += 1
        if "CALL" in turn.text:
            return Observation()
        return Observation([user_message(f"Question {self.num_turns}")], done=self.num_turns == 4)
"""


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeTalk]:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    (tmp_path / "asks_on.py").write_text(ASKS_ON)
    with closing(Stage) as make:
        yield lambda say, **options: make(say, environment_modules=[str(tmp_path / "asks_on.py")], **options)


def with_template(template: str, *tokens: str) -> ChatCodec:
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return ChatCodec(tokenizer)


def turns(*said: str) -> Say:
    spoken: list[str] = []

    def say(*_: Any) -> str:
        spoken.append(said[min(len(spoken), len(said) - 1)])
        return spoken[-1]

    return say


def prompts(stage: Stage) -> list[str]:
    """What the engine was given at each turn, with control tokens."""
    return [stage.chat.decode_all(np.asarray(prompt).tolist()) for prompt in stage.policy.prompts]


def rendered(chat: ChatCodec, *messages: tuple[str, str]) -> str:
    shown = [{"role": role, "content": content} for role, content in messages]
    return chat.render(shown, begins_turn=True)


# --- thoughts ---------------------------------------------------------------------------------------------------------


def test_thoughts_of_an_earlier_turn_leave_the_prompt_where_the_template_drops_them(talk: MakeTalk) -> None:
    """Turn 1 thinks and calls a tool, turn 2 answers without thoughts, and then the user speaks."""
    chat = with_template(AFTER_THE_LAST_QUESTION)
    said = ['<think>hm</think>\nCALL calculator {"expression": "1 + 1"}<end>', "It is 2.<end>", "three<end>"]
    stage = talk(turns(*said), chat=chat, tool_parser_type="vllm_played", tools=["calculator"], max_steps=8)
    result = stage.roll_out(text="1 + 1?", env_config={"env_name": "asks_on"})
    assert not result.error
    call = said[0].removesuffix("<end>")
    with_tool = [("user", "1 + 1?"), ("assistant", call), ("tool", "2")]
    later = [*with_tool, ("assistant", "It is 2."), ("user", "Question 2")]
    assert prompts(stage)[1] == rendered(chat, *with_tool)
    assert prompts(stage)[2] == rendered(chat, *later)
    assert "hm" in prompts(stage)[1]
    assert "hm" not in prompts(stage)[2]
    assert [sample.goes_on for sample in result.samples] == [True, False]  # nothing changes behind the second question
    assert prompts(stage)[3] == rendered(chat, *later, ("assistant", "three"), ("user", "Question 3"))


@pytest.mark.parametrize("closes", [True, False])
def test_thoughts_that_the_template_began_are_dropped_or_kept_whole(talk: MakeTalk, *, closes: bool) -> None:
    """The prompt ends with <think>, so that the policy only says the rest."""
    chat = with_template(
        chat_template("olmo_thinker_remove_intermediate_thinking")
        .replace("<|im_start|>", "")
        .replace("<|im_end|>", "<|end|>")
    )
    said = "so I </think>yes<end>" if closes else "so I go on<end>"
    stage = talk(turns(said), chat=chat, max_steps=8)
    result = stage.roll_out(text="Well?", env_config={"env_name": "asks_on"})
    assert not result.error
    second = prompts(stage)[1]
    assert second == rendered(
        chat, ("user", "Well?"), ("assistant", "<think>" + said.removesuffix("<end>")), ("user", "Question 1")
    )
    assert ("so I" in second) == (not closes)
    assert len(result.samples) == (4 if closes else 1)


# --- ends of turns ----------------------------------------------------------------------------------------------------


class TwoEndsTalk:
    """A policy that ends its turns with these control tokens."""

    def __init__(self, talk: MakeTalk, said: str) -> None:
        self.chat = with_template(TWO_ENDS, "<|done|>")
        self.stage = talk(turns(said), chat=self.chat, max_steps=8)
        self.result = self.stage.roll_out(text="Well?", env_config={"env_name": "asks_on"})


def test_an_end_of_two_control_tokens_is_written_once(talk: MakeTalk) -> None:
    both = TwoEndsTalk(talk, "one<|done|><end>")
    assert not both.result.error
    [sample] = both.result.samples
    assert prompts(both.stage)[1] == rendered(
        both.chat, ("user", "Well?"), ("assistant", "one"), ("user", "Question 1")
    )
    assert both.chat.decode_all(sample.response_ids.tolist()).count("<|done|>") == 4
    last_alone = TwoEndsTalk(talk, "one<end>")
    assert prompts(last_alone.stage)[1].startswith("<|user|>Well?<|end|><|assistant|>one<|end|><|user|>Question 1")


def test_what_a_turn_lacks_of_its_end_is_added() -> None:
    chat = with_template(TWO_ENDS, "<|done|>")
    bridge = Bridge(chat)

    def behind(ending: str) -> str:
        return chat.decode_all(bridge.suffix([user_message("Next")], ending))

    following = "<|user|>Next<|end|><|assistant|>"
    assert behind("") == "<|done|><|end|>" + following
    assert behind("<|done|>") == "<|end|>" + following
    assert behind("<|done|><|end|>") == behind("<|end|>") == following
    assert behind("<|end|><|done|>") == "<|end|>" + following
    turn = bridge.read_turn(chat.encode("one<|done|><|end|>"))
    assert (turn.raw, turn.ending, turn.content) == ("one<|done|>", "<|done|><|end|>", "one")


# --- answers that a template leaves out -------------------------------------------------------------------------------

LEAVES_OUT_TOOLS = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}"
    "{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_branch_never_loses_the_answer_of_a_tool(talk: MakeTalk) -> None:
    said = turns("<think>hm</think>\nCALL increment {}<end>", "CALL submit {}<end>")
    stage = talk(said, chat=with_template(LEAVES_OUT_TOOLS), tool_parser_type="vllm_played")
    result = stage.roll_out(env_config={"env_name": "counter", "target": 1})
    assert "the chat template leaves out what the role 'tool' says" in result.error
    assert result.samples == []


def test_rows_with_tools_are_refused_where_the_template_has_no_place_for_answers() -> None:
    chat = with_template(LEAVES_OUT_TOOLS)
    workflow = Conversations(ConversationOptions(tool_parser_type="vllm_hermes"))
    assert list(workflow.template_mistakes(chat)) == []  # a run whose rows name no tools needs no place
    with pytest.raises(
        ValueError, match=r"counter answers calls of tools, and --tool_parser_type vllm_hermes: .* leaves out"
    ):
        workflow.row_facts({"env_config": {"env_name": "counter"}})
    assert workflow.row_facts({"env_config": {"env_name": "wordle", "word": "crane"}})
    in_own_turn = Conversations(ConversationOptions())
    assert list(in_own_turn.template_mistakes(chat)) == []
    assert in_own_turn.row_facts({"env_config": {"env_name": "counter"}})


# --- calls for which no step is left, and rewards of several environments ---------------------------------------------


def test_calls_beyond_the_limit_are_answered_with_an_error(talk: MakeTalk) -> None:
    said = turns("\n".join(["CALL increment {}"] * 4) + "<end>", "well<end>")
    stage = talk(said, tool_parser_type="vllm_played", chat=with_template(AFTER_THE_LAST_QUESTION), max_model_len=4096)
    result = stage.roll_out(max_tokens=2048, env_config={"env_name": "counter", "target": 9, "max_steps": 2})
    assert not result.error
    account, (sample,) = result.notes[0], result.samples
    text = stage.chat.decode_all(sample.response_ids.tolist())
    answers = [part.partition("<|")[0] for part in text.split("<|tool|>")[1:]]
    refusal = "Error: not carried out, because a conversation may have 2 calls or steps"
    assert answers == ["Counter is now 1.", "Counter is now 2.", refusal, refusal]
    assert (account["num_steps"], account["calls"]["over_limit"]) == (2, [2.0, 2.0, 0.0])


TWO_JUDGES = """
from open_instruct.environments.base import ENVIRONMENTS, Ending, Environment, Observation, Opening

class Judge(Environment):
    takes_text = True
    rewards = ()

    async def reset(self, task, seed):
        self.left = list(self.rewards)
        return Opening()

    async def step(self, turn):
        return Observation([], reward=self.left.pop(0), done=not self.left)

@ENVIRONMENTS.register("judge_a")
class A(Judge):
    rewards = (0.5, 0.25)

    async def finish(self):
        return Ending()

@ENVIRONMENTS.register("judge_b")
class B(Judge):
    rewards = (0.125, 1.0)

    async def finish(self):
        return Ending(2.0)
"""


@pytest.mark.parametrize(
    ("aggregator", "names", "reward"),
    [
        ("last", ["judge_a"], 0.25),
        ("last", ["judge_b"], 2.0),  # what `finish` gives is the last
        ("last", ["judge_a", "judge_b"], 2.25),
        ("last", ["judge_b", "judge_a"], 2.25),
        ("sum", ["judge_b", "judge_a"], 0.75 + 3.125),
    ],
)
def test_the_rewards_of_two_environments_are_added_whatever_their_order(
    talk: MakeTalk, tmp_path: Path, aggregator: str, names: list[str], reward: float
) -> None:
    (tmp_path / "asks_on.py").write_text(TWO_JUDGES)
    stage = talk(turns("well<end>"), reward_aggregator=aggregator, max_steps=9)
    result = stage.roll_out(env_config=[{"env_name": name} for name in names])
    assert not result.error
    assert result.samples[0].environment_reward == reward
