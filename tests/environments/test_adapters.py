"""Functions and classes that were written for others, each in a real process of its own."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environment_stage import EnvironmentStage, call, free_port, wait_for_port

from open_instruct.environments.adapters import UnknownEnvironment, environment_class
from open_instruct.environments.base import Turn, mistake_in_config
from open_instruct.environments.gymnasium_like import UnreadableAction, is_gymnasium_like, read_action, without_escapes
from open_instruct.environments.mcp_tools import MCPTools
from open_instruct.environments.processes import EnvironmentFailed

FUNCTIONS = '''
    import asyncio
    import os


    def add(a: int, b: int = 1) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b


    async def wait(text: str) -> dict:
        """Says a text again, later.

        Args:
            text: what to say
        """
        await asyncio.sleep(0.01)
        return {"said": text, "pid": os.getpid()}


    def without_docs(a: int) -> int:
        return a
'''
TRL = '''
    """Classes as they are written for TRL's `environment_factory`."""


    class Safe:
        """Opens with a number of two digits, of which each guess is told."""

        def __init__(self):
            self.tries = 0

        def reset(self, code=12, **kwargs) -> str | None:
            self.code, self.opened, self.closed = code, False, False
            return f"The safe of {kwargs['prompt'][0]['content']} is locked."

        def turn_dial(self, number: int) -> str:
            """
            Turns the dial.

            Args:
                number: Where to turn the dial to

            Returns:
                What is heard.
            """
            if self.opened:
                raise ValueError("The safe is open.")
            self.tries += 1
            self.opened = number == self.code
            return "click" if self.opened else "nothing"

        async def listen(self) -> dict:
            """Listens for a while."""
            return {"tries": self.tries}

        def get_reward(self) -> float:
            return 1.0 / self.tries if self.opened else 0.0

        def _hidden(self):
            raise AssertionError


    class Echo:
        """Keeps its reward in an attribute, which a reward function would read."""

        def reset(self, **kwargs):
            self.reward = 0.0

        def echo(self, message: str) -> str:
            """
            Says it again.

            Args:
                message: what to say
            """
            self.reward = len(message) / 10
            return message
'''
SKYRL = '''
    class Adder:
        """skyrl-gym's interface: `init` and `step` of texts."""

        def __init__(self, env_config=None, extras={}):
            self.limit = env_config.limit
            self.truth = extras["reward_spec"]["ground_truth"]
            self.level = extras["level"]
            self.turns = 0

        def init(self, prompt):
            return [*prompt, {"role": "user", "content": f"Level {self.level}, {self.limit} turns."}], {}

        def step(self, action):
            self.turns += 1
            right = self.truth in action
            done = right or self.turns >= self.limit
            observations = [] if done else [{"role": "user", "content": "Again."}]
            return {"observations": observations, "reward": float(right), "done": done, "metadata": {}}

        def get_metrics(self):
            return {"turns": self.turns, "name": "adder"}

        def close(self):
            pass
'''
OPEN_INSTRUCT = '''
    """The shapes of open-instruct's `RLEnvironment` and `TextRLEnvironment`."""

    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import Any


    @dataclass
    class StepResult:
        result: str
        reward: float = 0.0
        done: bool = False
        metadata: dict[str, Any] = field(default_factory=dict)


    PRESS = {"type": "function", "function": {"name": "press", "description": "Presses", "parameters": {
        "type": "object", "properties": {"times": {"type": "integer"}}, "required": ["times"]}}}


    class Button:
        response_role = "tool"

        def __init__(self, needed=2, **kwargs):
            self.needed, self.pressed = needed, 0

        @classmethod
        def get_tool_definitions(cls):
            return [PRESS]

        async def setup(self):
            self.is_set_up = True

        async def reset(self, needed=None, **kwargs):
            assert self.is_set_up
            self.needed, self.pressed = needed or self.needed, 0
            return StepResult("ready"), [PRESS]

        async def step(self, call):
            if call.name != "press":
                return StepResult("no such tool", metadata={"error": True})
            self.pressed += call.args["times"]
            return StepResult(f"pressed {self.pressed}", float(self.pressed == self.needed), self.pressed >= self.needed)

        def get_metrics(self):
            return {"pressed": float(self.pressed)}

        async def shutdown(self):
            Path(__file__).with_name("shut_down").touch()


    class Parrot:
        response_role = "user"

        async def reset(self, **kwargs):
            self.word = kwargs["word"]
            return StepResult(""), []

        async def text_step(self, text):
            return StepResult(f"You said {text}", float(self.word in text), self.word in text)

        def get_metrics(self):
            return {}
'''
GYMNASIUM = '''
    import random


    class Word:
        """Texts as observations and actions."""

        def __init__(self, words=("cat", "dog")):
            self.words = list(words)

        def reset(self, *, seed=None, options=None):
            self.word = (options or {}).get("word") or random.Random(seed).choice(self.words)
            self.turns = 0
            return f"A word of {len(self.word)} letters.", {"word": self.word}

        def step(self, action):
            self.turns += 1
            return f"Not {action!r}.", float(action == self.word), action == self.word, self.turns >= 3, {}


    class Space:
        n, start, shape = 3, 1, ()


    class Door:
        """Numbers as actions and observations, by its action space."""

        action_space = Space()

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            assert type(action) is int
            return [action, 2], 0.5, action == 3, False, {}


    class Lift:
        """Numbers as actions, by the type hint."""

        def reset(self, *, seed=None, options=None):
            self.floor = 0
            return {"floor": 0}, {}

        def step(self, action: int):
            self.floor += action
            return {"floor": self.floor}, 0.0, self.floor > 9, False, {}


    class Old:
        """As it was before Gymnasium 0.26."""

        def reset(self, seed=None):
            return 0, {}

        def step(self, action):
            return 0, 1.0, True, {}
'''


@pytest.fixture(scope="module")
def stage() -> Iterator[EnvironmentStage]:
    stage = EnvironmentStage()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each kind."""
    folder = tmp_path_factory.mktemp("theirs")
    kinds = {"functions": FUNCTIONS, "trl": TRL, "skyrl": SKYRL, "oi": OPEN_INSTRUCT, "gymnasium": GYMNASIUM}
    for name, source in kinds.items():
        (folder / f"{name}_kind.py").write_text(textwrap.dedent(source))
    return folder


def target(files: Path, kind: str, name: str) -> str:
    return f"{files}/{kind}_kind.py:{name}"


def names_of_schemas(of: str, **config: Any) -> list[str]:
    return [one["function"]["name"] for one in environment_class(of).schemas(config)]


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_function_answers_and_its_errors_go_to_the_model(stage: EnvironmentStage, files: Path) -> None:
    of = target(files, "functions", "add")
    [described] = environment_class(of).schemas({})
    assert described["function"]["parameters"]["required"] == ["a"]
    assert described["function"]["description"] == "Adds two numbers."
    said = stage.play(of, call("add", a=2), call("add", b=2), call("add", a="x", b=1), call("add", a=1, c=3))
    assert said.texts[0] == "3"
    assert "missing a required argument: 'a'" in said.texts[1]
    assert said.texts[2].startswith("Error: TypeError: ")
    assert "unexpected keyword argument 'c'" in said.texts[3]
    assert [one.num_errors for one in said.observations] == [0, 1, 1, 1]


def test_arguments_are_valid_text_and_keep_their_letters(stage: EnvironmentStage, files: Path) -> None:
    said = stage.play(target(files, "functions", "wait"), call("wait", text="Grüße 😀 \ud83d!"))
    assert json.loads(said.texts[0])["said"] == "Grüße 😀 ?!"


def test_a_coroutine_function_is_waited_for_in_another_process(stage: EnvironmentStage, files: Path) -> None:
    said = stage.play(target(files, "functions", "wait"), call("wait", text="later"))
    values = json.loads(said.texts[0])
    assert values["said"] == "later"
    assert values["pid"] != os.getpid()


def test_a_function_without_docstring_and_a_name_that_is_missing_are_refused(files: Path) -> None:
    with pytest.raises(ValueError, match="without_docs: "):
        environment_class(target(files, "functions", "without_docs")).schemas({})
    with pytest.raises(UnknownEnvironment, match="has no nothing"):
        environment_class(target(files, "functions", "nothing"))


# --- classes with tools -----------------------------------------------------------------------------------------------


def test_a_class_for_trl_has_its_text_its_tools_its_errors_and_its_reward(stage: EnvironmentStage, files: Path) -> None:
    of = target(files, "trl", "Safe")
    assert names_of_schemas(of) == ["listen", "turn_dial"]
    turns = [call("turn_dial", number=1), call("turn_dial", number=42), call("listen"), call("turn_dial", number=42)]
    said = stage.play(of, *turns, task={"code": 42})
    assert [message["content"] for message in said.opening.messages] == ["The safe of Go. is locked."]
    assert said.texts == ["nothing", "click", '{"tries": 2}', "Error: ValueError: The safe is open."]
    assert [one.num_errors for one in said.observations] == [0, 0, 0, 1]
    assert said.rewards == [None] * 4
    assert said.reward == 0.5


LAMP = '''
    from __future__ import annotations

    from typing import Literal, Optional


    class Lamp:
        def reset(self, **kwargs) -> Optional[str]:
            return None

        def turn(self, way: Literal["on", "off"], room: Optional[str] = None) -> str:
            """Turns it.

            Args:
                way: on or off
                room: where it is
            """
            return f"{way} in {room}"

        @classmethod
        def kinds(cls) -> str:
            """Says what there is."""
            return cls.__name__

        @staticmethod
        def shown(text):
            return text
'''


def test_a_class_for_trl_may_write_its_hints_as_text_and_have_static_helpers(
    stage: EnvironmentStage, tmp_path: Path
) -> None:
    (tmp_path / "lamp.py").write_text(textwrap.dedent(LAMP))
    of = f"{tmp_path}/lamp.py:Lamp"
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in environment_class(of).schemas({})}
    assert list(schemas) == ["kinds", "turn"]
    assert list(schemas["turn"]["properties"]) == ["way", "room"]
    assert schemas["turn"]["properties"]["way"]["enum"] == ["on", "off"]
    assert schemas["turn"]["required"] == ["way"]
    assert stage.play(of, call("turn", way="on"), call("kinds")).texts == ["on in None", "Lamp"]


def test_a_class_for_trl_may_keep_its_reward_in_an_attribute(stage: EnvironmentStage, files: Path) -> None:
    said = stage.play(target(files, "trl", "Echo"), call("echo", message="hello"))
    assert said.opening.messages == []
    assert (said.texts, said.reward) == (["hello"], 0.5)


@pytest.mark.parametrize(
    ("kind", "name", "right"),
    [("trl", "Safe", {}), ("oi", "Parrot", {}), ("gymnasium", "Word", {"words": ["cat"]}), ("functions", "add", {})],
)
def test_an_argument_that_a_class_does_not_take_is_a_mistake_before_the_run(
    files: Path, kind: str, name: str, right: dict[str, Any]
) -> None:
    cls = environment_class(target(files, kind, name))
    assert mistake_in_config(cls, right) == ""
    assert "got an unexpected keyword argument 'nothing'" in mistake_in_config(cls, {"nothing": 1})


def test_the_settings_of_a_class_for_skyrl_gym_are_its_own_business(files: Path) -> None:
    assert mistake_in_config(environment_class(target(files, "skyrl", "Adder")), {"limit": 2}) == ""


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_class_for_skyrl_gym(stage: EnvironmentStage, files: Path) -> None:
    of, settings = target(files, "skyrl", "Adder"), {"task": {"level": 3}, "limit": 2}
    said = stage.play(of, Turn("45"), Turn("It is 46"), Turn("never"), **settings)
    assert [message["content"] for message in said.opening.messages] == ["Level 3, 2 turns."]
    assert said.texts == ["Again.", ""]
    assert said.rewards == [0.0, 1.0]
    assert said.metrics == {"turns": 2.0}
    assert stage.play(of, Turn("1"), Turn("2"), **settings).rewards == [0.0, 0.0]


INITS = {
    "prompt.append(more); return prompt, {}": ["more"],
    "return prompt + [more], {}": ["more"],
    "return prompt, {}": [],
    "return [more, *prompt], {}": None,
    "prompt[-1]['content'] += '!'; return prompt, {}": None,
}


@pytest.mark.parametrize(("body", "opening"), INITS.items())
def test_a_class_for_skyrl_gym_may_only_add_to_the_prompt(
    stage: EnvironmentStage, tmp_path: Path, body: str, opening: list[str] | None
) -> None:
    path = tmp_path / "adds.py"
    path.write_text(
        "class Adds:\n    def init(self, prompt):\n        more = {'role': 'user', 'content': 'more'}\n"
        f"        {body}\n    def step(self, action):\n        raise AssertionError\n"
    )
    if opening is None:
        with pytest.raises(EnvironmentFailed, match="init has changed the messages of the row"):
            stage.play(f"{path}:Adds")
    else:
        said = stage.play(f"{path}:Adds").opening.messages
        assert [message["content"] for message in said] == opening


def test_an_environment_of_open_instruct(stage: EnvironmentStage, files: Path) -> None:
    of = target(files, "oi", "Button")
    assert names_of_schemas(of) == ["press"]
    said = stage.play(of, call("pull"), call("press", times=1), call("press", times=2), task={"needed": 3})
    assert said.texts == ["no such tool", "pressed 1", "pressed 3"]
    assert said.observations[1].messages[0] == {"role": "tool", "name": "press", "content": "pressed 1"}
    assert [(one.reward, one.done, one.num_errors) for one in said.observations] == [
        (0.0, False, 1),
        (0.0, False, 0),
        (1.0, True, 0),
    ]
    assert said.metrics == {"pressed": 3.0}
    deadline = time.monotonic() + 10.0
    while not (files / "shut_down").exists():
        assert time.monotonic() < deadline, "the environment was not closed"
        time.sleep(0.05)


def test_a_text_environment_of_open_instruct(stage: EnvironmentStage, files: Path) -> None:
    said = stage.play(target(files, "oi", "Parrot"), Turn("hi"), Turn("a cookie"), task={"word": "cookie"})
    assert said.observations[0].messages == [{"role": "user", "content": "You said hi"}]
    assert [(one.reward, one.done) for one in said.observations] == [(0.0, False), (1.0, True)]


# --- Gymnasium --------------------------------------------------------------------------------------------------------


def test_a_gymnasium_environment_of_texts(stage: EnvironmentStage, files: Path) -> None:
    of = target(files, "gymnasium", "Word")
    said = stage.play(of, Turn("bird"), Turn("horse"), task={"word": "horse"})
    assert said.opening.messages == [{"role": "user", "content": "A word of 5 letters."}]
    assert said.texts == ["Not 'bird'.", "Not 'horse'."]
    assert [(one.reward, one.done) for one in said.observations] == [(0.0, False), (1.0, True)]
    assert said.metrics == {"steps": 2.0, "return": 1.0, "unreadable_actions": 0.0, "truncated": 0.0}
    late = stage.play(of, Turn("a"), Turn("b"), Turn("c"), task={"word": "horse"})
    assert late.metrics["truncated"] == 1.0
    assert late.observations[-1].done


def test_a_gymnasium_environment_has_the_seed_of_the_prompt(stage: EnvironmentStage, files: Path) -> None:
    def won(seed: int) -> list[bool]:
        of = target(files, "gymnasium", "Word")
        return [stage.play(of, Turn(word), seed=seed).observations[0].done for word in ("cat", "dog")]

    assert won(3) == won(3)
    assert {won(seed).index(True) for seed in range(6)} == {0, 1}


def test_a_gymnasium_environment_takes_the_last_number_of_a_turn(stage: EnvironmentStage, files: Path) -> None:
    of = target(files, "gymnasium", "Door")
    turns = ["I take 2", "[1] and not 3", "none", "[0]", "[9] no, 2.5", "first [1], then [3]"]
    said = stage.play(of, *map(Turn, turns))
    assert said.opening.messages[0]["content"] == "0"
    expected = "a whole number from 1 to 3 in square brackets, such as [1]."
    assert said.texts == [
        "[2, 2]",
        "[1, 2]",
        f"Error: no action was found. Say {expected}",
        f"Error: there is no action 0. Say {expected}",
        f"Error: there is no action 9. Say {expected}",
        "[3, 2]",
    ]
    assert [one.num_errors for one in said.observations] == [0, 0, 1, 1, 1, 0]
    assert [one.reward for one in said.observations] == [0.5, 0.5, None, None, None, 0.5]
    assert said.metrics == {"steps": 3.0, "return": 1.5, "unreadable_actions": 3.0, "truncated": 0.0}


def test_a_gymnasium_environment_may_ask_for_an_int_by_its_type_hint(stage: EnvironmentStage, files: Path) -> None:
    said = stage.play(target(files, "gymnasium", "Lift"), Turn("up -2"), Turn("up"), Turn("[12]"))
    assert said.texts[0] == '{"floor": -2}'
    assert said.texts[1].startswith("Error: no action was found.")
    assert said.observations[2].done


def test_a_gymnasium_environment_of_four_values_is_refused_and_not_scored(stage: EnvironmentStage, files: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"step must return five values, as Gymnasium has it since 0\.26"):
        stage.play(target(files, "gymnasium", "Old"), Turn("[1]"))


class Square:
    """Stands for a space of arrays."""

    shape, dtype = (2, 2), np.float32

    def contains(self, action: np.ndarray) -> bool:
        return action.shape == self.shape and bool((abs(action) <= 1).all())


class Board:
    action_space = Square()

    def step(self, action: object) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("I take [[0, 1], [0.5, -1]] now", ""),
        ("[0, 1]", "no action was found"),
        ("[[0, 1]]", "is no action"),
        ("[[0, 1], [2, 0]]", "is no action"),
        ("[[0, a], [1, 1]]", "is no list of numbers"),
        ("[[0], [1, 1]]", "is no list of numbers"),
    ],
)
def test_an_action_of_several_numbers_is_a_list(text: str, wrong: str) -> None:
    if not wrong:
        assert read_action(text, Board()).tolist() == [[0, 1], [0.5, -1]]
        return
    with pytest.raises(UnreadableAction, match=wrong) as told:
        read_action(text, Board())
    assert "a list of numbers in the shape [2, 2], such as [[0, 0], [0, 0]]" in str(told.value)


def test_a_class_of_tools_with_a_step_is_not_taken_for_gymnasium() -> None:
    class Tools:
        def reset(self, **kwargs: object) -> str:
            """Of TRL."""
            return ""

        def step(self, action: str) -> str:
            """A tool."""
            return action

    class Scored:
        def reset(self, seed: int = 0, **kwargs: object) -> str:
            return ""

        def step(self, action: str) -> str:
            return action

        def get_reward(self) -> float:
            return 1.0

    assert not is_gymnasium_like(Tools)
    assert not is_gymnasium_like(Scored)


def test_colours_of_a_picture_become_brackets() -> None:
    assert without_escapes("  (Down)\nSF\x1b[41mF\x1b[0mF\n") == "  (Down)\nSF[F]F\n"


# --- MCP --------------------------------------------------------------------------------------------------------------

MCP_SERVER = '''
    import sys

    from mcp.server import MCPServer

    server = MCPServer("shop")


    @server.tool()
    def price(fruit: str, number: int = 1) -> str:
        """What a fruit costs."""
        return f"{number} {fruit}: {number * {'apple': 2, 'pear': 3}[fruit]}"


    @server.tool()
    def close_shop() -> str:
        """Ends."""
        return "closed"


    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
'''


@pytest.fixture(scope="module")
def mcp_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "shop.py"
    path.write_text(textwrap.dedent(MCP_SERVER))
    return path


def check_shop(stage: EnvironmentStage, config: dict[str, Any]) -> None:
    schemas = MCPTools.schemas(config)
    assert [one["function"]["name"] for one in schemas] == ["price", "close_shop"]
    assert schemas[0]["function"]["parameters"]["required"] == ["fruit"]
    [only] = MCPTools.schemas({**config, "tool_name": "close_shop"})
    assert only["function"]["name"] == "close_shop"
    said = stage.play("generic_mcp", call("price", fruit="pear", number=2), call("price", fruit="stone"), **config)
    assert said.texts[0] == "2 pear: 6"
    assert said.observations[1].num_errors == 1
    assert said.texts[1].startswith("Error executing tool price")
    again = stage.play("generic_mcp", call("price", fruit="apple"), **config)  # the same process, the same connection
    assert again.texts == ["1 apple: 2"]


def test_the_tools_of_an_mcp_server_over_stdio(stage: EnvironmentStage, mcp_server: Path) -> None:
    program = {"transport": "stdio", "command": sys.executable, "args": [str(mcp_server), "stdio"]}
    check_shop(stage, program)
    with pytest.raises(ValueError, match="the server has no tool 'steal'; it has: price, close_shop"):
        MCPTools.schemas({**program, "tool_name": "steal"})


def test_the_tools_of_an_mcp_server_over_http(stage: EnvironmentStage, mcp_server: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(mcp_server), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port, process)
        check_shop(stage, {"server_url": f"http://127.0.0.1:{port}/mcp"})
    finally:
        process.kill()
        process.wait()
    with pytest.raises(OSError, match="the MCP server does not answer"):
        MCPTools.schemas({"server_url": f"http://127.0.0.1:{port}/mcp", "timeout": 3.0})


GROUPED = """
    from open_instruct.environments.base import ToolEnvironment


    class Grouped(ToolEnvironment):
        is_stateless = True

        async def call(self, name, arguments):
            raise BaseExceptionGroup("tasks", [ExceptionGroup("inner", [ConnectionError("refused")]), SystemExit()])
"""


def test_an_error_in_a_group_of_errors_is_named(stage: EnvironmentStage, tmp_path: Path) -> None:
    """The transports of MCP raise theirs so."""
    (tmp_path / "grouped.py").write_text(textwrap.dedent(GROUPED))
    with pytest.raises(EnvironmentFailed, match="it: step: ConnectionError: refused"):
        stage.play(f"{tmp_path}/grouped.py:Grouped", call("any"))
    url = f"http://127.0.0.1:{free_port()}/sse"
    with pytest.raises(EnvironmentFailed, match="it: step: ConnectError: "):
        stage.play("generic_mcp", call("price"), transport="sse", server_url=url)


def test_an_open_env_server_that_is_slow_is_named_with_the_setting(
    stage: EnvironmentStage, open_env: tuple[Any, str]
) -> None:
    with pytest.raises(EnvironmentFailed, match=r"no answer to step within 0\.5 s \(timeout in --tool_configs\)"):
        stage.play("openenv", Turn("sleep"), url=open_env[1], timeout=0.5)


def test_an_mcp_server_that_is_gone_is_no_answer_to_the_model(stage: EnvironmentStage) -> None:
    with pytest.raises(EnvironmentFailed, match="it: step: "):
        stage.play("generic_mcp", call("price"), transport="stdio", command=sys.executable, args=["-c", "0"])


# --- OpenEnv ----------------------------------------------------------------------------------------------------------


class OpenEnvServer:
    """Speaks OpenEnv's protocol over a real WebSocket, with room for `most` sessions."""

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self.num_sessions = 0
        self.num_refused = 0
        self.heard: list[dict[str, Any]] = []

    async def serve(self, request: Any) -> Any:
        from aiohttp import WSMsgType, web

        channel = web.WebSocketResponse()
        await channel.prepare(request)
        if self.num_sessions >= self.most:
            self.num_refused += 1
            await channel.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await channel.close()
            return channel
        self.num_sessions += 1
        try:
            async for message in channel:
                if message.type is not WSMsgType.TEXT:
                    break
                said = message.json()
                self.heard.append(said)
                if said["type"] == "close":
                    break
                await self._answer(channel, said)
        finally:
            self.num_sessions -= 1
        return channel

    async def _answer(self, channel: Any, said: dict[str, Any]) -> None:
        if said["type"] == "reset":
            values = {"observation": {"prompt": "Say hello."}, "reward": None, "done": False}
        elif "message" not in said["data"]:
            errors = [{"loc": ["message"], "msg": "Field required"}]
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            await channel.send_json({"type": "error", "data": error})
            return
        elif said["data"]["message"] == "crash":
            await channel.send_json({"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}})
            return
        elif said["data"]["message"] == "leave":
            await channel.close()
            return
        elif said["data"]["message"] == "sleep":
            await asyncio.sleep(30)
            return
        else:
            done = said["data"]["message"] == "hello"
            values = {"observation": {"length": len(said["data"]["message"])}, "reward": float(done), "done": done}
        await channel.send_json({"type": "observation", "data": values})


@pytest.fixture
def open_env(stage: EnvironmentStage) -> Iterator[tuple[OpenEnvServer, str]]:
    """A server in the stage's event loop, and its address."""
    from aiohttp import web

    server, app = OpenEnvServer(), web.Application()
    app.router.add_get("/ws", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    yield server, f"http://127.0.0.1:{stage.run(start())}"
    stage.run(runner.cleanup())


def test_a_session_on_an_open_env_server(stage: EnvironmentStage, open_env: tuple[OpenEnvServer, str]) -> None:
    server, url = open_env
    said = stage.play("openenv", Turn("hi"), Turn("hello"), Turn("never"), task={"level": 3}, url=url)
    assert said.opening.messages == [{"role": "user", "content": "Say hello."}]
    assert said.texts == ['{"length": 2}', '{"length": 5}']
    assert [(one.reward, one.done) for one in said.observations] == [(0.0, False), (1.0, True)]
    assert server.heard[0] == {"type": "reset", "data": {"seed": 7, "level": 3}}
    assert [one["type"] for one in server.heard] == ["reset", "step", "step", "close"]


def test_what_an_open_env_server_does_not_take_is_told_to_the_model(
    stage: EnvironmentStage, open_env: tuple[OpenEnvServer, str]
) -> None:
    said = stage.play("openenv", Turn("hi"), url=open_env[1], action="words")
    assert said.texts == ["Error: Invalid message; message: Field required"]
    assert said.observations[0].num_errors == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("crash", "the server says: it broke"),
        ("leave", "the server ended the session"),
        ("sleep", "step took longer than 1 s"),
    ],
)
def test_an_open_env_server_that_fails_is_no_answer_to_the_model(
    stage: EnvironmentStage, open_env: tuple[OpenEnvServer, str], said: str, why: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        stage.play("openenv", Turn(said), url=open_env[1], deadline_s=1.0 if said == "sleep" else 60.0)


def test_a_session_waits_while_the_open_env_server_is_full(
    stage: EnvironmentStage, open_env: tuple[OpenEnvServer, str]
) -> None:
    server, url = open_env
    server.num_sessions = 1  # of somebody else

    async def leave() -> None:
        while not server.num_refused:
            await asyncio.sleep(0.01)
        server.num_sessions = 0

    async def both() -> Any:
        _, said = await asyncio.gather(leave(), stage._play("openenv", [Turn("hello")], {}, 7, 60.0, {"url": url}))
        return said

    assert stage.run(both()).rewards == [1.0]
    assert server.num_refused >= 1
