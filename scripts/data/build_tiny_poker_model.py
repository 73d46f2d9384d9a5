"""Builds the tiny model in `assets/tiny_poker_model/` that the demo of self-play trains: it plays Kuhn poker at random.

    python scripts/data/build_tiny_poker_model.py --output_dir assets/tiny_poker_model

The make of `build_tiny_model.py`, smaller, with another upbringing. It is shown games between two players who mix habits:

    at random      a legal move, whatever the cards are
    by the card    the king bets and calls, the knave checks and folds: few, so that the model looks at its card at all
    illegal        a move of the game that is not legal now, such as [call] where nobody has bet
    no move        a sentence without a move in brackets

So reinforcement learning has something to find: which moves are valid, and that cards matter. Writes the rows of the demo, too.

Deterministic, and recorded in `build.json`, like the other tiny models. Takes about 3 minutes on one quiet core.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from build_tiny_model import BuildConfig, MicroBatch, make_model, start_build, train_tokenizer, warm_up, write_record
from build_tiny_tools_model import Piece, Pieces, micro_batches
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from open_instruct.user_modules import import_user_module

ROOT = Path(__file__).parents[2]
KUHN: Any = import_user_module(str(ROOT / "scripts" / "train" / "debug" / "kuhn_poker.py"))
ROUNDS = 1
PROMPT = "Deal {:04d}."
NUM_TRAIN, NUM_EVAL = 512, 128
HABITS = {"at random": 0.4, "by the card": 0.25, "illegal": 0.15, "no move": 0.2}
"""Shares of the demonstrated turns."""
BY_CARD = {"J": ("check", "fold"), "Q": ("check", "call"), "K": ("bet", "call")}
MOVES = ("check", "bet", "fold", "call")
SENTENCES = ("I {}.", "{}", "My move is {}", "With this card I {} now.")
CONFIG = BuildConfig(
    vocab_size=768,
    hidden_size=96,
    num_layers=2,
    intermediate_size=256,
    batch_size=64,
    num_micro_batches=4,
    arithmetic_steps=700,
    habit_steps=0,
)


def turn(view: dict[str, Any], card: str, rng: random.Random) -> str:
    """A player's turn, by one of the habits."""
    (habit,) = rng.choices(list(HABITS), weights=list(HABITS.values()))
    legal = [move.strip("[]") for move in view["legal"]]
    if habit == "at random":
        return f"[{rng.choice(legal)}]"
    if habit == "by the card":
        return f"[{next(move for move in BY_CARD[card] if move in legal)}]"
    if habit == "illegal":
        return f"[{rng.choice([move for move in MOVES if move not in legal])}]"
    return rng.choice(SENTENCES).format(rng.choice(legal))


def games(rng: random.Random) -> Iterator[list[list[str]]]:
    """Games without end: for each seat what it hears and says in turn, beginning with what it hears."""
    while True:
        seed, said = rng.getrandbits(32), list[str]()
        heard: list[list[str]] = [[], []]
        cards: dict[int, str] = {}
        while not (view := KUHN.play(seed, ROUNDS, said))["done"]:
            seat, news = view["seat"], view["news"]
            cards.setdefault(seat, news.partition("Your card is: '")[2][:1])
            said.append(turn(view, cards[seat], rng))
            heard[seat] += [news, said[-1]]
        yield heard


def pieces_of(heard: list[str], pieces: Pieces, rng: random.Random) -> list[Piece]:
    """One seat's conversation."""
    row = [pieces.prompt(PROMPT.format(rng.randrange(10_000)), heard[0])]
    for number, text in enumerate(heard[1:]):
        row.append(pieces.game(text) if number % 2 else pieces.said(text, ends=True))
    return row


def batches(config: BuildConfig, pieces: Pieces, pad: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step."""
    rng = random.Random(config.seed)
    source = (pieces_of(heard, pieces, rng) for game in games(rng) for heard in game if heard)
    for _ in range(config.steps):
        rows = [next(source) for _ in range(config.batch_size)]
        yield micro_batches(rows, config, pad)


def tokenizer_texts(rng: random.Random) -> list[str]:
    """What the tokenizer is trained on."""
    source = games(rng)
    texts = [text for _ in range(500) for heard in next(source) for text in heard]
    return texts + [PROMPT.format(rng.randrange(10_000)) for _ in range(500)]


def build(config: BuildConfig) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """Model, tokenizer and the last loss."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(tokenizer_texts(random.Random(config.seed)), config.vocab_size)
    model = make_model(config, tokenizer)
    return model, tokenizer, warm_up(model, config, batches(config, Pieces(tokenizer), tokenizer.pad_token_id))


def write_rows(path: Path, first: int, number: int) -> None:
    """Rows that say nothing but the number of the deal: cards come from the prompt's seed."""
    rows = (
        {"messages": [{"role": "user", "content": PROMPT.format(deal)}], "ground_truth": "the game says"}
        for deal in range(first, first + number)
    )
    path.write_text("".join(json.dumps({**row, "dataset": "passthrough"}) + "\n" for row in rows))


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_poker_model", CONFIG)
    start = time.process_time()
    model, tokenizer, loss = build(config)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    write_rows(output_dir.parent / "kuhn_poker_train.jsonl", 0, NUM_TRAIN)
    write_rows(output_dir.parent / "kuhn_poker_eval.jsonl", NUM_TRAIN, NUM_EVAL)
    facts = {
        "habits": HABITS,
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
    }
    write_record(output_dir, Path(__file__).name, config, facts, "textarena")


if __name__ == "__main__":
    main(sys.argv[1:])
