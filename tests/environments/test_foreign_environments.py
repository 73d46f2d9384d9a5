"""Environments of other projects, unchanged: their packages are installed for the test, each apart from ours (slow)."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from environment_stage import EnvironmentStage, call, free_port, wait_for_port

from open_instruct.environments.adapters import environment_class
from open_instruct.environments.base import Message, Turn
from open_instruct.environments.processes import EnvironmentFailed

pytestmark = pytest.mark.slow

UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
INSTALL_S = 400.0


def uv(*words: str) -> None:
    """Run uv. Skips the test where no package registry can be reached."""
    done = subprocess.run([UV, *words], capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode and re.search("connect|dns|resolve host|network", done.stderr, re.IGNORECASE):
        pytest.skip(f"no package registry can be reached: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def stage() -> Iterator[EnvironmentStage]:
    """A pool of its own, whose processes see what the test has put on the path."""
    stage = EnvironmentStage()
    yield stage
    stage.close()


def installed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package without its dependencies, on the path of this process and of those that it starts."""
    uv("pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(folder), name)
    monkeypatch.syspath_prepend(str(folder))


# --- skyrl-gym --------------------------------------------------------------------------------------------------------


@pytest.fixture
def skyrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    installed("skyrl-gym==0.4.0", tmp_path / "skyrl", monkeypatch)
    before = set(sys.modules)
    yield "skyrl_gym.envs"
    environment_class.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("skyrl_gym"):
            del sys.modules[name]


def test_environments_of_skyrl_gym(stage: EnvironmentStage, skyrl: str) -> None:
    one_turn = f"{skyrl}.gsm8k.env:GSM8kEnv"
    assert environment_class(one_turn).takes_text
    assert stage.play(one_turn, Turn("12 + 34, so\n#### 46")).rewards == [1]
    assert stage.play(one_turn, Turn("It is 46")).rewards == [0]
    turns = [Turn("hm"), Turn("#### 45"), Turn("#### 46"), Turn("never")]
    said = stage.play(f"{skyrl}.gsm8k.multi_turn_env:GSM8kMultiTurnEnv", *turns, task={"max_turns": 4})
    assert said.rewards == [0.0, pytest.approx(0.2 / 4), 1.0]
    assert [one.done for one in said.observations] == [False, False, True]
    assert "#### ANSWER" in said.texts[0]
    assert said.metrics == {"steps": 3.0}
    right = stage.play(f"{skyrl}.aime.env:AIMEEnv", Turn("Answer: 46"))
    wrong = stage.play(f"{skyrl}.aime.env:AIMEEnv", Turn("Answer: 45"))
    assert right.rewards > wrong.rewards
    assert right.observations[0].done


# --- OpenEnv and TRL --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The echo environment that OpenEnv 0.10.0 itself makes, served by OpenEnv; its address."""
    folder = tmp_path_factory.mktemp("openenv")
    uv("venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", str(python), "openenv==0.10.0")
    made = subprocess.run(
        [str(python.with_name("openenv")), "init", "echo_env"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert (folder / "echo_env" / "server" / "app.py").exists(), made.stdout + made.stderr
    port = free_port()
    words = [str(python), "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(words, cwd=folder / "echo_env")
    try:
        wait_for_port(port, process, limit_s=120.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
def test_an_open_env_server(stage: EnvironmentStage, echo_server: str) -> None:
    said = stage.play("openenv", Turn("hi"), Turn("a longer text"), url=echo_server)
    assert said.opening.messages == [{"role": "user", "content": "Echo Env environment ready!"}]
    assert said.texts == ["hi", "a longer text"]
    assert said.rewards == pytest.approx([0.2, 1.0])
    wrong = stage.play("openenv", Turn("hi"), url=echo_server, action="words")
    assert wrong.texts[0].startswith("Error: Invalid message; ")
    assert "message: Field required" in wrong.texts[0]


@pytest.mark.timeout(900)
def test_sessions_on_an_open_env_server_with_one_place_come_one_after_the_other(
    stage: EnvironmentStage, echo_server: str
) -> None:
    import asyncio

    async def several() -> list[list[str]]:
        config = {"url": echo_server}
        episodes = [stage._play("openenv", [Turn(f"I am {i}")], {}, 7, 60.0, config) for i in range(4)]
        return [episode.texts for episode in await asyncio.gather(*episodes)]

    assert stage.run(several()) == [[f"I am {i}"] for i in range(4)]


TRL_CLASS = '''
    """As TRL 1.16's documentation writes an environment: a client of a server, tools as methods, the reward in an attribute."""

    import json
    import urllib.request


    class Client:
        def __init__(self, base_url):
            self.base_url = base_url

        def ask(self, path, **values):
            body = json.dumps(values).encode()
            request = urllib.request.Request(self.base_url + path, body, {{"Content-Type": "application/json"}})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)


    class EchoToolEnv:
        def __init__(self):
            self.client = Client("{url}")
            self.reward = 0.0

        def reset(self, **kwargs) -> str | None:
            self.reward = 0.0
            self.done = False
            return self.client.ask("/reset")["observation"]["echoed_message"]

        def echo(self, message: str) -> str:
            """
            Echo the message back from the environment.

            Args:
                message: The message to echo

            Returns:
                The echoed message.
            """
            if self.done:
                raise ValueError("Episode over.")
            said = self.client.ask("/step", action={{"message": message}})
            self.reward = said["reward"]
            self.done = self.reward >= 1.0
            return said["observation"]["echoed_message"]
'''


@pytest.mark.timeout(900)
def test_an_environment_class_of_trl_over_an_open_env_server(
    stage: EnvironmentStage, echo_server: str, tmp_path: Path
) -> None:
    path = tmp_path / "echo_for_trl.py"
    path.write_text(textwrap.dedent(TRL_CLASS).format(url=echo_server))
    target = f"{path}:EchoToolEnv"
    [described] = environment_class(target).schemas({})
    assert described["function"]["name"] == "echo"
    assert described["function"]["parameters"]["required"] == ["message"]
    said = stage.play(
        target, call("echo", message="hi"), call("echo", message="Hello World!"), call("echo", message="x")
    )
    assert said.opening.messages == [{"role": "user", "content": "Echo Env environment ready!"}]
    assert said.texts == ["hi", "Hello World!", "Error: ValueError: Episode over."]
    assert said.reward == 1.0


# --- Gymnasium --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for package in ("gymnasium", "farama-notifications", "cloudpickle"):
        installed(package, tmp_path / "gymnasium", monkeypatch)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        del sys.modules[name]


def test_frozen_lake_of_gymnasium(stage: EnvironmentStage, gymnasium: None) -> None:
    lake = {"id": "FrozenLake-v1", "is_slippery": False, "render_mode": "ansi"}
    turns = [*map(Turn, ["I go down, [1]", "and 1", "[7]", "right [2]", "[1]", "[2]", "[2]"])]
    said = stage.play("gymnasium", *turns, **lake)
    assert said.opening.messages[0]["content"] == "0\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert said.texts[1] == "8\n  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG"
    assert said.texts[2].startswith("Error: there is no action 7. Say a whole number from 0 to 3")
    assert said.observations[-1].done
    assert said.rewards == [0.0, 0.0, None, 0.0, 0.0, 0.0, 1.0]
    assert said.metrics == {"steps": 6.0, "return": 1.0, "unreadable_actions": 1.0, "truncated": 0.0}


def test_other_spaces_of_gymnasium(stage: EnvironmentStage, gymnasium: None) -> None:
    said = stage.play("gymnasium", Turn("[0.5]"), Turn("[0.5, 1]"), Turn("none"), Turn("[9]"), id="Pendulum-v1")
    assert len(json.loads(said.opening.messages[0]["content"])) == 3
    assert [one.num_errors for one in said.observations] == [0, 1, 1, 1]
    assert said.texts[2].endswith("Say a list of numbers in the shape [1], such as [0].")
    pole = stage.play("gymnasium", *[Turn("[1]")] * 30, id="CartPole-v1")
    assert pole.observations[-1].done
    assert pole.metrics["return"] == len(pole.observations) < 30
    assert environment_class("gymnasium").problem({"id": "Nothing-v9"}) == "gymnasium has no environment 'Nothing-v9'"
    with pytest.raises(EnvironmentFailed, match="it: make: "):
        stage.play("gymnasium", id="Nothing-v9")


def test_without_gymnasium_the_user_is_told_to_install_it() -> None:
    assert environment_class("gymnasium").problem({"id": "CartPole-v1"}).startswith("install gymnasium")


# --- TextArena --------------------------------------------------------------------------------------------------------


def shown(messages: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def guess_by_halves(messages: Sequence[Message]) -> Turn:
    """GuessTheNumber: the middle of what the hints have left."""
    lowest, highest = 1, 20
    for message in messages[1:]:
        middle = (lowest + highest) // 2
        lowest, highest = (middle + 1, highest) if "higher" in message["content"] else (lowest, middle - 1)
    return Turn(f"I say [{(lowest + highest) // 2}]")


def break_code(messages: Sequence[Message]) -> Turn:
    """Mastermind: the first code that fits all that was told."""
    told = re.findall(r"Submitted \[([\d ]+)\]\. Feedback: (\d) black peg\(s\), (\d) white", shown(messages))
    for code in itertools.permutations("123456", 4):
        if all(_pegs(code, guess.split()) == (int(black), int(white)) for guess, black, white in told):
            return Turn(f"[{' '.join(code)}]")
    raise AssertionError(told)


def _pegs(code: Sequence[str], guess: Sequence[str]) -> tuple[int, int]:
    black = sum(one == other for one, other in zip(code, guess, strict=True))
    return black, len(set(code) & set(guess)) - black


def cross_lake(messages: Sequence[Message]) -> Turn:
    """FrozenLake: a step on the shortest way around the holes."""
    rows = [line.strip("|").split("|") for line in str(messages[-1]["content"]).splitlines() if line.startswith("|")]
    cells = {(y, x): cell.strip() for y, row in enumerate(rows) for x, cell in enumerate(row)}
    place = {cell: where for where, cell in cells.items() if cell}
    ways = {"down": (1, 0), "right": (0, 1), "up": (-1, 0), "left": (0, -1)}
    queue: deque[tuple[tuple[int, int], str]] = deque([(place["P"], "")])
    seen = {place["P"]}
    while queue:
        (y, x), first = queue.popleft()
        if (y, x) == place["G"]:
            return Turn(f"[{first}]")
        for name, (dy, dx) in ways.items():
            there = (y + dy, x + dx)
            if there in cells and cells[there] != "H" and there not in seen:
                seen.add(there)
                queue.append((there, first or name))
    raise AssertionError(messages[-1])


TOWER = [Turn(f"[{move}]") for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]


@pytest.mark.parametrize(
    ("game", "turns", "most"),
    [
        ("GuessTheNumber-v0", guess_by_halves, 10),
        ("Mastermind-v0", break_code, 20),
        ("FrozenLake-v0", cross_lake, 20),
        ("TowerOfHanoi-v0", None, 7),
    ],
)
def test_games_of_textarena_are_won_by_who_plays_well(
    stage: EnvironmentStage, game: str, turns: object, most: int
) -> None:
    for seed in range(3):
        plan = [turns] * most if callable(turns) else TOWER
        said = stage.play("textarena", *plan, task={"game": game}, seed=seed)
        assert said.observations[-1].done
        assert said.observations[-1].reward == 1.0
        assert said.metrics["solved"] == 1.0
        again = stage.play("textarena", *plan, task={"game": game}, seed=seed)
        assert (again.opening, again.texts) == (said.opening, said.texts)


def test_blackjack_of_textarena_pays_a_share_of_its_hands(stage: EnvironmentStage) -> None:
    rewards = set()
    for seed in range(4):
        said = stage.play("textarena", *[Turn("[Stand]")] * 5, task={"game": "Blackjack-v0"}, seed=seed)
        assert said.observations[-1].done
        rewards.add(said.observations[-1].reward)
    assert rewards <= {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}
    assert len(rewards) > 1


GAMES = [
    *("2048-v0", "Bandit-v0", "Crosswords-v0", "FifteenPuzzle-v0", "LightsOut-v0", "LogicPuzzle-v0", "Minesweeper-v0"),
    *("PegJump-v0", "RushHour-v0", "Secretary-v0", "Sokoban-v0", "Sudoku-v0"),
]


@pytest.mark.parametrize("game", GAMES)
def test_a_game_of_textarena_answers_nonsense_and_ends(stage: EnvironmentStage, game: str) -> None:
    said = stage.play("textarena", *[Turn("no move at all")] * 8, task={"game": game})
    assert len(shown(said.opening.messages)) > 100
    assert said.observations[-1].done
    assert (said.observations[-1].reward or 0.0) < 1.0


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_a_game_of_textarena_that_ends_without_a_reward_is_not_scored(stage: EnvironmentStage, game: str) -> None:
    """After wrong moves TextArena 0.7.4 says a sentence where the reward of these games should stand."""
    with pytest.raises(EnvironmentFailed, match=f"{game}-raw ends with '.*, which is no reward"):
        stage.play("textarena", *[Turn("no move at all")] * 3, task={"game": game})


def test_a_game_of_textarena_for_two_is_refused_by_name(stage: EnvironmentStage) -> None:
    with pytest.raises(EnvironmentFailed, match="Nim-v0 is no game for one player"):
        stage.play("textarena", task={"game": "Nim-v0"})
