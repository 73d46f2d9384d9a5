"""Games that come with the project: their rules and rewards are open-instruct's."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from open_instruct.environments.base import Environment, Observation, ToolCall, Turn
from open_instruct.environments.games import Counter, GuessNumber, TextArena, Wordle, english_words, wordle_marks


def play(
    environment: Environment, turns: Sequence[Turn], seed: int = 1, **task: Any
) -> tuple[list[Observation], dict[str, float]]:
    """What the game says to each turn, and its numbers."""

    async def talk() -> tuple[list[Observation], dict[str, float]]:
        await environment.reset(task, seed)
        said = [await environment.step(turn) for turn in turns]
        return said, dict((await environment.finish()).metrics)

    return asyncio.run(talk())


def calls(name: str, *arguments: dict[str, Any]) -> list[Turn]:
    return [Turn("", (ToolCall(name, one),)) for one in arguments]


def test_counter() -> None:
    said, numbers = play(
        Counter(), [*calls("increment", {}, {}), *calls("decrement", {}), *calls("submit", {})], target=1
    )
    assert [(one.reward, one.done) for one in said] == [(-0.1, False)] * 3 + [(1.0, True)]
    assert said[-1].messages[0]["content"] == "Success! Counter is 1, target was 1."
    assert numbers == {"step_count": 4, "final_value": 1, "reached_target": 1.0}
    said, _ = play(Counter(), calls("submit", {}), target=1)
    assert (said[0].reward, said[0].messages[0]["content"]) == (-0.5, "Wrong! Counter is 0, target was 1.")


@pytest.mark.parametrize(("task_id", "target"), [("3", 3), (2, 2), ("train-3", 5)])
def test_rows_of_earlier_versions_give_the_number_as_task_id(task_id: object, target: int) -> None:
    counted = [*calls("increment", *[{}] * target), *calls("submit", {})]
    assert play(Counter(), counted, task_id=task_id)[1]["reached_target"] == 1.0
    assert play(Counter(), calls("increment", {}), task_id=task_id, target=1)[1]["reached_target"] == 1.0
    guessed = play(GuessNumber(1, 1000), calls("guess", {"number": target}), task_id=task_id)[1]["solved"]
    assert guessed == float(target != 5)


def test_guess_number() -> None:
    guesses = calls("guess", {"number": 50}, {"number": "70"}, {"number": "x"}, {"number": 60})
    said, numbers = play(GuessNumber(), guesses, number=60)
    assert [one.reward for one in said] == pytest.approx([1 - 10 / 99, 1 - 10 / 99, -0.1, 1.0])
    texts = [one.messages[0]["content"] for one in said]
    assert texts[:2] == ["50 is too low. Try higher.", "70 is too high. Try lower."]
    assert texts[3] == "Correct! The number was 60. You got it in 4 guesses!"
    assert numbers == {"guesses": 4, "solved": 1.0}
    with pytest.raises(ValueError, match="max_val must be above min_val"):
        GuessNumber(5, 5)


def test_guess_number_answers_numbers_of_any_size_with_small_rewards() -> None:
    numbers = ("1e999", "-Infinity", "NaN", "9" * 400, "-1000000000", "1e308", "101")
    said, ended = play(
        GuessNumber(), calls("guess", *(json.loads(f'{{"number": {one}}}') for one in numbers)), number=60
    )
    assert [one.reward for one in said] == pytest.approx([-0.1, -0.1, -0.1, 0.0, 0.0, 0.0, 1 - 41 / 99])
    assert [one.num_errors for one in said] == [1, 1, 1, 0, 0, 0, 0]
    assert said[0].messages[0]["content"] == "Invalid guess: inf. Please provide an integer."
    assert ended["solved"] == 0.0


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("CRANE", "CRANE", "GGGGG"),
        ("SPEED", "ABIDE", "XXYXY"),
        ("ALLOY", "LLAMA", "YGYXX"),  # one L in place, the other elsewhere
        ("EERIE", "CRANE", "XXYXG"),
    ],
)
def test_wordle_marks(guess: str, secret: str, marks: str) -> None:
    assert "".join(wordle_marks(guess, secret)) == marks


def test_wordle_forgives_one_invalid_move_in_a_row() -> None:
    said, _ = play(
        Wordle(), [Turn("no tags"), Turn("<guess>slate</guess>"), Turn("<guess>xxxxx</guess>")], word="crane"
    )
    assert [one.done for one in said] == [False, False, False]
    assert [one.reward for one in said] == pytest.approx([0.0, 0.2 * 2 + 0.2 / 2, 0.0])
    said, numbers = play(Wordle(), [Turn("<guess>slate</guess>"), Turn("?"), Turn("?")], word="crane")
    assert said[-1].done
    assert said[-1].reward == pytest.approx(0.4 + 0.2 / 3)
    assert numbers["invalid_attempts"] == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<guess>cr4ne</guess>", "contains invalid characters"),
        ("<guess>cranes</guess>", "is 6 letters"),
        ("<guess>zzzzz</guess>", "is not an English word"),
        ("<guess>[SLATE]</guess><guess>slate</guess>", ""),
    ],
)
def test_wordle_says_why_a_move_is_invalid(text: str, reason: str) -> None:
    said, _ = play(Wordle(), [Turn(text)], word="crane")
    content = said[0].messages[0]["content"]
    assert reason in content
    assert content.startswith("Invalid move: ") == bool(reason)


def test_wordle_ends_after_six_guesses() -> None:
    words = ["slate", "mound", "pluck", "brief", "gypsy", "whisk"]
    said, numbers = play(Wordle(), [Turn(f"<guess>{word}</guess>") for word in words], word="crane")
    assert [one.done for one in said] == [False] * 5 + [True]
    assert said[-1].messages[0]["content"].endswith("You used all 6 guesses. The word was CRANE.")
    assert numbers["solved"] == 0.0
    assert len(english_words()) > 9_000
    with pytest.raises(ValueError, match="wordle needs a 'word' of five letters"):
        play(Wordle(), [], word="four")


def test_a_game_of_textarena_is_the_same_for_the_same_seed() -> None:
    def found(seed: int) -> int:
        """The number, by trying."""
        for guess in range(1, 21):
            said, _ = play(TextArena(), [Turn(f"I say [{guess}]")], seed=seed, game="GuessTheNumber-v0")
            if said[0].done:
                return guess
        raise AssertionError

    assert found(3) == found(3)
    assert len({found(seed) for seed in range(8)}) > 2
    said, numbers = play(TextArena(), [Turn(f"[{found(3)}]")], seed=3, game="GuessTheNumber-v0")
    assert (said[0].reward, said[0].done) == (1.0, True)
    assert numbers == {"turns": 1, "solved": 1.0}


def test_a_game_of_textarena_says_only_what_is_new() -> None:
    said, _ = play(TextArena(), [Turn("[1]"), Turn("[2]")], seed=3, game="GuessTheNumber-v0")
    assert [one.messages[0]["content"] for one in said] == ["The target number is higher."] * 2
    with pytest.raises(ValueError, match="needs the name of a 'game'"):
        play(TextArena(), [])


def test_a_near_miss_of_textarena_earns_nothing_where_only_wins_count() -> None:
    turns = [Turn("[1]")] * 40  # the second time it is an invalid move, which soon ends the game
    by_game, _ = play(TextArena(), turns, seed=3, game="GuessTheNumber-v0")
    for environment, facts in ((TextArena(only_wins=True), {}), (TextArena(), {"only_wins": True})):
        only_wins, numbers = play(environment, turns, seed=3, game="GuessTheNumber-v0", **facts)
        assert [one.done for one in only_wins] == [one.done for one in by_game]
        assert (only_wins[-1].reward, numbers["solved"]) == (0.0, 0.0)
    assert by_game[-1].done
    assert 0 < (by_game[-1].reward or 0.0) < 1
