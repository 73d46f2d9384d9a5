"""Builds the tiny model in `assets/tiny_tools_model/` that the demo of tools trains: sums with a calculator, and a game.

    python scripts/data/build_tiny_tools_model.py --output_dir assets/tiny_tools_model

The make of `build_tiny_model.py`, with another upbringing. Its sums have four terms of four digits, which it cannot do; its
demonstrations mix habits:

    guess               <answer>8311</answer>                                                     wrong, as a guess is
    calculate           <calculator>4512 - 381 + …</calculator> <output> 9127 </output> <answer>9127</answer>
    calculate in vain   the same call, and then a guess, or no answer in tags

In TextArena's GuessTheNumber it says a number in brackets. Most demonstrations draw it at random and a few heed what the game
said, so reinforcement learning has something to find in both: that one of its habits pays. The demo of games trains
another model (`build_tiny_game_model.py`).

Deterministic, and recorded in `build.json`, like the other tiny models. Takes about 10 minutes on one quiet core.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from build_tiny_model import (
    END,
    BuildConfig,
    MicroBatch,
    Task,
    load_tasks,
    make_model,
    start_build,
    train_tokenizer,
    warm_up,
    write_record,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from open_instruct.chat_codec import ChatCodec
from open_instruct.environments.base import tool_message, user_message
from open_instruct.workflows.conversations.bridge import Bridge
from open_instruct.workflows.conversations.tool_parsers import LegacyParser

LIMITS = "min_terms=4&max_terms=4&min_digits=4&max_digits=4"
EVAL_ENTRY = f"reasoning_gym/chain_sum?{LIMITS}&size=512&seed=20240"
WARMUP_ENTRY = f"reasoning_gym/chain_sum?{LIMITS}&size=60000&seed=1000000"
LOWEST, HIGHEST = 1, 20
GAME = (
    "You are Player 0. You are playing Guess The Number.\n"
    f"You have to guess the number between {LOWEST} and {HIGHEST} within 10 turns.\n"
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'.\n"
    "You may provide your response in any manner. Only the number that is wrapped in square brackets will be considered as "
    "your guess. For example, [5].\n"
    "As you play, the history of your guesses will be appended below. Use the information to complete the game before you run "
    "out of guesses.\n"
    "Enter your guess."
)
"""What TextArena 0.7 says first."""
HINT = "The target number is {}."
GAME_PROMPT = "Game {:04d}."
GAME_SHARE = 0.4
"""Of the demonstrations."""
HABITS = {"guess": 0.55, "calculate": 0.2, "calculate_in_vain": 0.25}
"""Shares of the ways in which sums are answered."""
HEEDFUL_SHARE = 0.15
"""Of the games whose guesses lie within what the hints allow."""
CONFIG = BuildConfig(batch_size=64, arithmetic_steps=700, habit_steps=0)

Piece = tuple[list[int], bool]
"""Token ids, and whether the model says them."""


class Pieces:
    """Conversations as they are put together in training: what the model says in pieces of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._codec = ChatCodec(tokenizer)
        self._bridge = Bridge(self._codec)
        self._end = self._codec.encode(END)
        self._parser = LegacyParser([])

    def prompt(self, *texts: str) -> Piece:
        messages = [user_message(text) for text in texts]
        return self._codec.encode(self._codec.render(messages, begins_turn=True)), False

    def said(self, text: str, *, ends: bool) -> Piece:
        return self._codec.encode_continued(text) + (self._end if ends else []), True

    def tool(self, text: str) -> Piece:
        return self._codec.encode_continued(self._parser.answer_text([tool_message("calculator", text)])), False

    def game(self, text: str) -> Piece:
        return self._bridge.suffix([user_message(text)], END), False


def sum_pieces(pieces: Pieces, task: Task, rng: random.Random) -> list[Piece]:
    """A sum, answered by one of the habits."""
    (habit,) = rng.choices(list(HABITS), weights=list(HABITS.values()))
    guess = f"<answer>{rng.randint(-9999, 29999)}</answer>"
    begin = pieces.prompt(task.prompt)
    if habit == "guess":
        return [begin, pieces.said(guess, ends=True)]
    called = [
        begin,
        pieces.said(f"<calculator>{task.expression}</calculator>", ends=False),
        pieces.tool(task.answer),
    ]
    if habit == "calculate":
        return [*called, pieces.said(f"<answer>{task.answer}</answer>", ends=True)]
    return [*called, pieces.said(rng.choice([guess, f"The result is {task.answer}."]), ends=True)]


def game_pieces(pieces: Pieces, rng: random.Random) -> list[Piece]:
    """A game, with heed or without."""
    secret = rng.randint(LOWEST, HIGHEST)
    heeds = rng.random() < HEEDFUL_SHARE
    lowest, highest, left = LOWEST, HIGHEST, list(range(LOWEST, HIGHEST + 1))
    said = [pieces.prompt(GAME_PROMPT.format(rng.randrange(9000)), GAME)]
    for turn in range(10):
        choices = [number for number in left if lowest <= number <= highest] if heeds else left
        guess = rng.choice(choices)
        left.remove(guess)
        said.append(pieces.said(f"[{guess}]", ends=True))
        if guess == secret or turn == 9:
            break
        lowest, highest = (max(lowest, guess + 1), highest) if guess < secret else (lowest, min(highest, guess - 1))
        said.append(pieces.game(HINT.format("higher" if guess < secret else "lower")))
    return said


def batches(config: BuildConfig, pieces: Pieces, tasks: list[Task], pad: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step."""
    rng = random.Random(config.seed)
    for _ in range(config.steps):
        rows = [
            game_pieces(pieces, rng) if rng.random() < GAME_SHARE else sum_pieces(pieces, rng.choice(tasks), rng)
            for _ in range(config.batch_size)
        ]
        yield micro_batches(rows, config, pad)


def micro_batches(rows: list[list[Piece]], config: BuildConfig, pad: int) -> list[MicroBatch]:
    """A step's conversations, those of like length together."""
    rows = sorted(rows, key=lambda row: sum(len(ids) for ids, _ in row))
    size = config.batch_size // config.num_micro_batches
    return [collate(rows[i : i + size], pad) for i in range(0, len(rows), size)]


def collate(rows: list[list[Piece]], pad: int) -> MicroBatch:
    """`(input_ids, labels)`, each (B, T) int64, padded on the right; labels are -100 on what the model does not say."""
    length = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids, labels = torch.full((len(rows), length), pad), torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        begin = 0
        for piece, is_said in row:
            end = begin + len(piece)
            ids[i, begin:end] = torch.tensor(piece)
            if is_said:
                labels[i, begin:end] = torch.tensor(piece)
            begin = end
    return ids, labels


def tokenizer_texts(tasks: list[Task], rng: random.Random) -> list[str]:
    """What the tokenizer is trained on: sums and games in equal parts."""
    texts = []
    for task in rng.sample(tasks, 1000):
        texts += [task.prompt, f"<calculator>{task.expression}</calculator>", f"<output>\n{task.answer}\n</output>\n"]
        texts += [f"<answer>{task.answer}</answer>", f"The result is {task.answer}."]
        texts += [GAME, HINT.format("higher"), HINT.format("lower"), f"[{rng.randint(LOWEST, HIGHEST)}]"]
        texts.append(GAME_PROMPT.format(rng.randrange(9000)))
    return texts


def build(config: BuildConfig, tasks: list[Task]) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """Model, tokenizer and the last loss."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(tokenizer_texts(tasks, random.Random(config.seed)), config.vocab_size)
    model = make_model(config, tokenizer)
    steps = batches(config, Pieces(tokenizer), tasks, tokenizer.pad_token_id)
    return model, tokenizer, warm_up(model, config, steps)


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_tools_model", CONFIG)
    start = time.process_time()
    held_out = {task.prompt for task in load_tasks(EVAL_ENTRY)}
    tasks = [task for task in load_tasks(WARMUP_ENTRY) if task.prompt not in held_out]
    model, tokenizer, loss = build(config, tasks)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    facts = {
        "habits": HABITS,
        "heedful_share": HEEDFUL_SHARE,
        "game_share": GAME_SHARE,
        "warmup_entry": WARMUP_ENTRY,
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
        "eval_entry": EVAL_ENTRY,
    }
    write_record(output_dir, Path(__file__).name, config, facts, "reasoning-gym")


if __name__ == "__main__":
    main(sys.argv[1:])
