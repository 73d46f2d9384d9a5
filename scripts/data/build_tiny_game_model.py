"""Builds the tiny model in `assets/tiny_game_model/` that the demo of games trains: it guesses numbers, mostly at random.

    python scripts/data/build_tiny_game_model.py --output_dir assets/tiny_game_model

The make of `build_tiny_model.py`, with another upbringing: TextArena's GuessTheNumber. It knows two ways to play,

    thoughtless    [17]              a number that was not said yet: half of the games are won, in 7.8 guesses on average
                                     (10 if the game is lost)
    thoughtful     6-21 [11]         the nearest numbers that are too low and too high, and a number between them: all games are
                                     won, in 4.6

and one demonstration of six is thoughtful. So reinforcement learning has something to find: who thinks first, wins.

Writes the rows of the demo, too. Deterministic, and recorded in `build.json`, like the other tiny models. Takes about 8 minutes
on one quiet core.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from build_tiny_model import BuildConfig, MicroBatch, make_model, start_build, train_tokenizer, warm_up, write_record
from build_tiny_tools_model import GAME, HIGHEST, HINT, LOWEST, Piece, Pieces, micro_batches
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROMPT, THOUGHT = "Game {:04d}.", "{}-{} "
NUM_TRAIN, NUM_EVAL = 512, 128
THOUGHTFUL_SHARE = 1 / 6
"""Of the games."""
MOST_GUESSES = 10
CONFIG = BuildConfig(vocab_size=768, batch_size=64, num_micro_batches=4, arithmetic_steps=800, habit_steps=0)


def game(pieces: Pieces, rng: random.Random) -> list[Piece]:
    """A conversation with the game."""
    secret = rng.randint(LOWEST, HIGHEST)
    lowest, highest, left = LOWEST, HIGHEST, list(range(LOWEST, HIGHEST + 1))
    said = [pieces.prompt(PROMPT.format(rng.randrange(10_000)), GAME)]
    thinks = rng.random() < THOUGHTFUL_SHARE
    for number in range(1, MOST_GUESSES + 1):
        guess = rng.choice([one for one in left if lowest <= one <= highest] if thinks else left)
        left.remove(guess)
        said.append(pieces.said(THOUGHT.format(lowest - 1, highest + 1) * thinks + f"[{guess}]", ends=True))
        if guess == secret or number == MOST_GUESSES:
            break
        lowest, highest = (max(lowest, guess + 1), highest) if guess < secret else (lowest, min(highest, guess - 1))
        said.append(pieces.game(HINT.format("higher" if guess < secret else "lower")))
    return said


def batches(config: BuildConfig, pieces: Pieces, pad: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step."""
    rng = random.Random(config.seed)
    for _ in range(config.steps):
        rows = [game(pieces, rng) for _ in range(config.batch_size)]
        yield micro_batches(rows, config, pad)


def tokenizer_texts(rng: random.Random) -> list[str]:
    """What the tokenizer is trained on."""
    texts = []
    for _ in range(1000):
        texts += [PROMPT.format(rng.randrange(10_000)), GAME, HINT.format("higher"), HINT.format("lower")]
        texts.append(
            THOUGHT.format(rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST))
            + f"[{rng.randint(LOWEST, HIGHEST)}]"
        )
    return texts


def build(config: BuildConfig) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """Model, tokenizer and the last loss."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(config.seed)), config.vocab_size)
    model = make_model(config, tokenizer)
    return model, tokenizer, warm_up(model, config, batches(config, Pieces(tokenizer), tokenizer.pad_token_id))


def write_rows(path: Path, first: int, number: int) -> None:
    """Rows that say nothing but the number of the game: the secret comes from the prompt's seed."""
    environment = {"env_name": "textarena", "game": "GuessTheNumber-v0", "only_wins": True}
    rows = (
        {
            "messages": [{"role": "user", "content": PROMPT.format(game_number)}],
            "ground_truth": "the game says",
            "dataset": "passthrough",
            "env_config": environment,
        }
        for game_number in range(first, first + number)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_game_model", CONFIG)
    start = time.process_time()
    model, tokenizer, loss = build(config)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    write_rows(output_dir.parent / "guess_the_number_train.jsonl", 0, NUM_TRAIN)
    write_rows(output_dir.parent / "guess_the_number_eval.jsonl", 9000, NUM_EVAL)
    facts = {
        "thoughtful_share": THOUGHTFUL_SHARE,
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
    }
    write_record(output_dir, Path(__file__).name, config, facts)


if __name__ == "__main__":
    main(sys.argv[1:])
