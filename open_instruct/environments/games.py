"""Games: those of open-instruct's debug scripts with the rules and rewards that they have there, and TextArena's."""

import functools
import importlib.util
import random
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from open_instruct.environments.base import (
    ENVIRONMENTS,
    Ending,
    Environment,
    Observation,
    Opening,
    Schema,
    ToolEnvironment,
    ToolError,
    Turn,
    schema,
    tool_message,
    user_message,
)
from open_instruct.environments.wire import as_text


def _number_of_row(task: Mapping[str, Any], name: str, default: int) -> int:
    """The setting `name` of a row, or its `task_id` where that is a number: rows made for earlier versions of open-instruct say
    `"task_id": "7"` where today's say `"target": 7`."""
    task_id = str(task.get("task_id", ""))
    return int(task.get(name, task_id if task_id.isdecimal() else default))


@ENVIRONMENTS.register("counter")
class Counter(ToolEnvironment):
    """Count up or down to a target, then submit. The row says `target`."""

    def __init__(self, target: int = 5) -> None:
        self._target = target
        self._value = 0
        self._num_steps = 0

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return [
            schema("increment", "Increment the counter by 1"),
            schema("decrement", "Decrement the counter by 1"),
            schema("submit", "Submit current value as answer"),
        ]

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        self._target = _number_of_row(task, "target", self._target)
        self._value = self._num_steps = 0
        return Opening()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self._num_steps += 1
        if name == "submit":
            has_won = self._value == self._target
            text = f"{'Success' if has_won else 'Wrong'}! Counter is {self._value}, target was {self._target}."
            return Observation([tool_message(name, text)], 1.0 if has_won else -0.5, done=True)
        self._value += 1 if name == "increment" else -1
        return Observation([tool_message(name, f"Counter is now {self._value}.")], -0.1)

    async def finish(self) -> Ending:
        reached = float(self._value == self._target)
        numbers = {"step_count": self._num_steps, "final_value": self._value, "reached_target": reached}
        return Ending(metrics=numbers)


@ENVIRONMENTS.register("guess_number")
class GuessNumber(ToolEnvironment):
    """Guess a number between `min_val` and `max_val`. The row says `number`; without it the seed draws it.

    A wrong guess gives 1 less its share of the range that it is off: with 1 to 100, guessing 50 for 60 gives 1 - 10 / 99. Unlike
    open-instruct's it never gives less than 0, because a guess of 10^9 would have a reward beside which no other counts.
    """

    def __init__(self, min_val: int = 1, max_val: int = 100) -> None:
        if max_val <= min_val:
            raise ValueError(f"max_val must be above min_val, got {min_val} and {max_val}")
        self._lowest, self._highest = min_val, max_val
        self._secret = 0
        self._num_guesses = 0
        self._has_won = False

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return [schema("guess", "Make a guess", {"number": {"type": "integer", "description": "Your guess"}})]

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        default = random.Random(seed).randint(self._lowest, self._highest)
        self._secret = _number_of_row(task, "number", default)
        self._num_guesses, self._has_won = 0, False
        return Opening()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self._num_guesses += 1
        value = arguments.get("number", 0)
        try:
            guess = int(value)
        except (ValueError, TypeError, OverflowError):  # JSON's 1e999 is an infinite number
            text = f"Invalid guess: {value}. Please provide an integer."
            return Observation([tool_message(name, text)], -0.1, num_errors=1)
        if guess == self._secret:
            self._has_won = True
            text = f"Correct! The number was {self._secret}. You got it in {self._num_guesses} guesses!"
            return Observation([tool_message(name, text)], 1.0, done=True)
        width = self._highest - self._lowest
        closeness = 1.0 - min(abs(guess - self._secret), width) / width
        text = f"{guess} is too low. Try higher." if guess < self._secret else f"{guess} is too high. Try lower."
        return Observation([tool_message(name, text)], closeness)

    async def finish(self) -> Ending:
        return Ending(metrics={"guesses": self._num_guesses, "solved": float(self._has_won)})


_GUESS = re.compile(r"<guess>\s*\[?([^<\]]+)\]?\s*</guess>", re.IGNORECASE)


@ENVIRONMENTS.register("wordle")
class Wordle(Environment):
    """Guess a word of five letters in `<guess>` tags. The row says `word`.

    Feedback and rewards are those of open-instruct's `WordleTextEnv`: 0.2 for a letter in its place and 0.1 for one elsewhere,
    0.2 for the share of turns with tags, 1 and one part of the turns for the word. One invalid move in a row is forgiven.

    Args:
        words: file with the words that may be guessed, one in a line. By default reasoning-gym's list of English words.
    """

    takes_text = True

    @classmethod
    def prepare(cls) -> None:
        english_words()

    def __init__(self, max_guesses: int = 6, error_allowance: int = 1, words: str | None = None) -> None:
        self._max_guesses, self._error_allowance = max_guesses, error_allowance
        self._words = english_words() if words is None else _words_of(words)
        self._secret = ""
        self._guesses: list[str] = []
        self._num_turns = self._num_tagged = self._num_errors = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        word = task.get("word")
        if not isinstance(word, str) or len(word) != 5 or not word.isalpha():
            raise ValueError(f"wordle needs a 'word' of five letters in env_config, got {word!r}")
        self._secret = word.upper()
        self._guesses = []
        self._num_turns = self._num_tagged = self._num_errors = 0
        return Opening()

    async def step(self, turn: Turn) -> Observation:
        self._num_turns += 1
        guesses = _GUESS.findall(turn.text)
        if not guesses:
            return self._invalid("Please submit a 5-letter word inside <guess>...</guess> tags.")
        self._num_tagged += 1
        word = guesses[-1].strip()
        problem = self._problem(word)
        if problem:
            return self._invalid(problem)
        self._num_errors = 0
        return self._valid(word.upper())

    def _problem(self, word: str) -> str:
        if not word.isalpha():
            return f"Your guess '{word}' contains invalid characters. Please submit a single word."
        if len(word) != 5:
            return f"Your guess '{word}' is {len(word)} letters. Please submit a 5-letter word."
        if word.upper() in self._guesses:
            return f"You have already guessed '{word.upper()}' before. Please try a different word."
        if word.lower() not in self._words and word.upper() != self._secret:
            return f"'{word.upper()}' is not an English word."
        return ""

    def _valid(self, guess: str) -> Observation:
        self._guesses.append(guess)
        marks = wordle_marks(guess, self._secret)
        feedback = f"\n{' '.join(guess)}\n{' '.join(marks)}\n"
        if guess == self._secret:
            reward = 1.0 + 1.0 / self._num_turns + self._form_reward()
            text = f"{feedback}Congratulations! You guessed the word correctly!"
            return Observation([user_message(text)], reward, done=True)
        reward = _partial(marks) + self._form_reward()
        num_left = self._max_guesses - len(self._guesses)
        if num_left <= 0:
            text = f"{feedback}You used all {self._max_guesses} guesses. The word was {self._secret}."
            return Observation([user_message(text)], reward, done=True)
        return Observation([user_message(f"{feedback}You have {num_left} guesses left.")], reward)

    def _invalid(self, reason: str) -> Observation:
        self._num_errors += 1
        if self._num_errors <= self._error_allowance:
            text = f"Invalid move: {reason} Please resubmit a valid move."
            return Observation([user_message(text)], 0.0, num_errors=1)
        partial = _partial(wordle_marks(self._guesses[-1], self._secret)) if self._guesses else 0.0
        text = f"Invalid move: {reason}"
        return Observation([user_message(text)], partial + self._form_reward(), done=True, num_errors=1)

    def _form_reward(self) -> float:
        return 0.2 * self._num_tagged / self._num_turns

    async def finish(self) -> Ending:
        marks = [mark for guess in self._guesses for mark in wordle_marks(guess, self._secret)]
        return Ending(
            metrics={
                "guesses": len(self._guesses),
                "invalid_attempts": self._num_errors,
                "solved": float(self._guesses[-1:] == [self._secret]),
                "total_greens": marks.count("G"),
                "total_yellows": marks.count("Y"),
            }
        )


def wordle_marks(guess: str, secret: str) -> list[str]:
    """G for a letter in its place, Y for one that stands elsewhere, X for one that is not in the word, or not as often."""
    letters = [letter for letter, guessed in zip(secret, guess, strict=True) if letter != guessed]
    marks = []
    for letter, guessed in zip(secret, guess, strict=True):
        if letter == guessed:
            marks.append("G")
        elif guessed in letters:
            letters.remove(guessed)
            marks.append("Y")
        else:
            marks.append("X")
    return marks


def _partial(marks: list[str]) -> float:
    return 0.2 * marks.count("G") + 0.1 * marks.count("Y")


@functools.cache
def english_words() -> frozenset[str]:
    """The words of five letters in reasoning-gym's list, in lower case."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None, "reasoning-gym is installed with the project"
    assert spec.submodule_search_locations, spec
    return _words_of(Path(spec.submodule_search_locations[0]) / "data" / "words3to10.txt")


def _words_of(path: str | Path) -> frozenset[str]:
    words = (word.lower() for word in Path(path).read_text(encoding="utf-8").split())
    return frozenset(word for word in words if len(word) == 5)


@ENVIRONMENTS.register("textarena")
class TextArena(Environment):
    """A game of TextArena for one player, such as `GuessTheNumber-v0`. The row or the configuration says `game`.

    The player sees what the game says, and answers in text. The reward is the game's, at its end.

    Args:
        only_wins: a reward of 1 for a game that was won (the game's reward is 1 or more) and 0 for any other, because what games
            give for a near miss may be easier to raise than the share of games that are won. The row may say it, too.
        options: of the game.
    """

    takes_text = True

    def __init__(self, game: str = "", only_wins: bool = False, **options: Any) -> None:
        self._game, self._only_wins, self._options = game, only_wins, options
        self._own: Any = None
        self._num_turns = 0
        self._reward = 0.0

    @classmethod
    def prepare(cls) -> None:
        import textarena  # noqa: F401

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        import textarena

        game = task.get("game", self._game)
        if not game:
            raise ValueError("textarena needs the name of a 'game', such as GuessTheNumber-v0")
        self._only_wins = bool(task.get("only_wins", self._only_wins))
        random.seed(seed)  # some games draw from Python's own generator
        self._own = textarena.make(f"{game}-raw", **self._options)  # raw: what is new alone, not all that was said
        try:
            self._own.reset(num_players=1, seed=seed % 2**32)
        except AssertionError as error:
            raise ValueError(f"textarena: {game} is no game for one player: {error}") from error
        self._num_turns, self._reward = 0, 0.0
        return Opening([user_message(self._news())])

    def _news(self) -> str:
        """What the game has said since the player looked last, without the player's own words."""
        player, messages = self._own.get_observation()
        return "\n".join(
            as_text(message) for sender, message, *_ in messages if sender != player
        )  # some games say numbers

    async def step(self, turn: Turn) -> Observation:
        if self._own is None:
            raise ToolError("the game has not begun")
        self._num_turns += 1
        done, _ = self._own.step(turn.text)
        if not done:
            return Observation([user_message(self._news())])
        rewards, _ = self._own.close()
        reward = (rewards or {}).get(0)
        if not isinstance(reward, Real):  # in 0.7.4 Countdown, Cryptarithm and Slitherlink say it so after a wrong move
            raise ValueError(f"textarena: {self._own.env_id} ends with {reward!r:.80}, which is no reward")
        self._reward = float(reward)
        if self._only_wins:
            self._reward = float(self._reward >= 1.0)
        return Observation([], self._reward, done=True)

    async def finish(self) -> Ending:
        return Ending(metrics={"turns": self._num_turns, "solved": float(self._reward >= 1.0)})
