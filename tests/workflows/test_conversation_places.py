"""Conversations that share few processes: none waits for ever, whatever they keep and call. Processes are real."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from played_policy import Say, Stage, closing

MakeTalk = Callable[..., Stage]
COUNTER, WORDLE = {"env_name": "counter", "target": 1}, {"env_name": "wordle", "word": "crane"}
LOOK_UP = '''
    def look_up(word: str) -> str:
        """Looks up.

        Args:
            word: a word
        """
        return "found"
'''


@pytest.fixture
def talk() -> Iterator[MakeTalk]:
    with closing(Stage) as make:
        yield make


@pytest.fixture
def two_tools(tmp_path: Path) -> list[str]:
    path = tmp_path / "my_tools.py"
    path.write_text(textwrap.dedent(LOOK_UP))
    return ["calculator", f"{path}:look_up"]


def each_says(*orders: tuple[str, ...]) -> Say:
    """A model that says one of these series of turns in each conversation, by its number."""
    spoken: dict[int, int] = {}

    def say(_: str, number: int) -> str:
        spoken[number] = spoken.get(number, 0) + 1
        order = orders[number % len(orders)]
        return order[min(spoken[number], len(order)) - 1]

    return say


@pytest.mark.parametrize(("pool_size", "n"), [(1, 1), (1, 4), (2, 4)])
def test_a_conversation_with_two_tools_needs_one_process_at_a_time(
    talk: MakeTalk, two_tools: list[str], pool_size: int, n: int
) -> None:
    calls = ("<calculator>1+1</calculator>", "<look_up>x</look_up>")
    say = each_says((*calls, "done<end>"), (*calls[::-1], "done<end>"))
    result = talk(say, tools=two_tools, pool_size=pool_size).roll_out(n=n)
    assert not result.error
    assert [account["num_restarts"] for account in result.notes] == [0] * n
    assert {tuple(sorted(account["calls"])) for account in result.notes} == {("calculator", "look_up")}


WHO = '''
    import os
    from pathlib import Path

    def who() -> str:
        """Who answers?"""
        with Path(__file__).with_name("answered").open("a") as file:
            print(os.getpid(), file=file)
        return "I"
'''


def test_a_tool_that_is_called_again_is_answered_by_the_same_process(talk: MakeTalk, tmp_path: Path) -> None:
    path = tmp_path / "who.py"
    path.write_text(textwrap.dedent(WHO))
    said = ("CALL who {}<end>",) * 3 + ("done<end>",)
    stage = talk(each_says(said), tools=[f"{path}:who"], tool_parser_type="vllm_played", pool_size=1)
    assert not stage.roll_out(n=3).error
    answered = (tmp_path / "answered").read_text().split()
    assert (len(answered), len(set(answered))) == (9, 1)


def test_conversations_that_keep_an_environment_and_call_a_tool_leave_a_process_for_the_calls(talk: MakeTalk) -> None:
    calls = ('CALL calculator {"expression": "1+1"}<end>',) * 2 + ("CALL increment {}<end>", "CALL submit {}<end>")
    stage = talk(
        each_says(calls), tools=["calculator"], tool_parser_type="vllm_played", pool_size=2, conversation_timeout_s=50.0
    )
    result = stage.roll_out(n=4, env_config={**COUNTER, "max_steps": 9})
    assert not result.error
    assert [account["num_restarts"] for account in result.notes] == [0] * 4
    assert {sample.environment_reward for sample in result.samples} == {1.0}


def test_a_row_may_use_some_functions_of_the_environment_that_it_names(talk: MakeTalk) -> None:
    def say(text: str, _: int) -> str:
        return "CALL submit {}<end>" if "CALL increment" in text else "CALL increment {}<end>"

    stage = talk(say, tools=["counter"], tool_parser_type="vllm_played", pool_size=4)
    row = {"tools": ["increment", "submit"], "env_config": COUNTER}
    names = [one["function"]["name"] for one in stage.workflow.row_schemas(stage.workflow.row_facts(row))]
    assert names == ["increment", "submit"]
    for number in range(3):  # each has places again
        result = stage.roll_out(stage.request(n=4, number=number, **row))
        assert not result.error
        assert {sample.environment_reward for sample in result.samples} == {1.0}


def test_conversations_get_their_environments_all_or_none(talk: MakeTalk) -> None:
    say = each_says(("<guess>slate</guess> CALL increment {}<end>", "<guess>crane</guess><end>"))
    stage = talk(say, tool_parser_type="vllm_played", pool_size=3, conversation_timeout_s=50.0)
    for number in range(6):
        entries = [COUNTER, WORDLE] if number % 2 else [WORDLE, COUNTER]
        stage.runner.start(stage.request(n=2, number=number, env_config={"env_configs": entries, "max_steps": 9}))
    results = stage.wait_for(6)
    assert not any(result.error for result in results)
    assert not any(account["num_restarts"] for result in results for account in result.notes)


RESTORABLE = """
    import os
    from pathlib import Path

    from open_instruct.environments.base import Environment, Observation, Opening, user_message


    class Dies(Environment):
        takes_text = True

        async def reset(self, task, seed):
            self.number = 0
            return Opening()

        async def step(self, turn):
            with Path(__file__).with_name("steps").open("a") as file:
                file.write("x")
                if file.tell() in (3, 6, 9):
                    os._exit(1)
            self.number += 1
            return Observation([user_message("on")], 1.0, self.number == 4)

        def dump(self):
            return self.number

        def load(self, state):
            self.number = state
"""


def test_an_environment_that_dies_is_restored_in_its_own_place(talk: MakeTalk, tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text(textwrap.dedent(RESTORABLE))
    stage = talk(lambda *_: "well<end>", tools=[f"{path}:Dies", "counter"], max_steps=9, pool_size=2)
    result = stage.roll_out(n=4)
    assert not result.error
    assert sum(account["num_restores"] for account in result.notes) == 3
    assert not any(account["num_restarts"] for account in result.notes)


@pytest.mark.parametrize(
    ("options", "facts", "why"),
    [
        ({"pool_size": 2}, {"env_config": [COUNTER, WORDLE]}, None),
        (
            {"pool_size": 1},
            {"env_config": [COUNTER, WORDLE]},
            r"2 processes at once \(one each for counter, wordle\), and --pool_size allows 1: raise --pool_size to 2 or more",
        ),
        (
            {"pool_size": 2, "tools": ["calculator"]},
            {"env_config": [COUNTER, WORDLE]},
            r"3 processes at once \(one each for counter, wordle, and its tools one more\)",
        ),
        ({"pool_size": 1, "tools": ["calculator", "counter"]}, {"tools": ["calculator"]}, None),
        ({"pool_size": 1, "tools": ["calculator", "counter"]}, {"tools": ["counter"]}, None),
        ({"pool_size": 1, "tools": ["calculator", "counter"]}, {}, "2 processes at once"),
        ({"pool_size": 1, "tools": ["calculator", "python", "search"]}, {}, None),
    ],
)
def test_a_row_whose_environments_have_no_room_is_told_before_the_run(
    talk: MakeTalk, options: dict[str, Any], facts: dict[str, Any], why: str | None
) -> None:
    stage = talk(each_says(("<end>",)), **options)
    if why is None:
        stage.request(**facts)
        return
    with pytest.raises(ValueError, match=why):
        stage.request(**facts)
