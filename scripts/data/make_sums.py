"""Writes questions about sums of two numbers as rows that `--dataset_mixer_list` reads.

    python scripts/data/make_sums.py --output_dir out/sums                           two digits, to be added in the head
    python scripts/data/make_sums.py --output_dir out/tool_sums --with_calculator    four digits, after an example of a call

`test.jsonl` holds 256 questions, `train.jsonl` up to 8,000 others, which ask for other pairs of numbers in either order. The same
files come out each time.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NUM_HELD_OUT = 256
NUM_TRAIN = 8000
CALL = [
    {"role": "user", "content": "What is 2310 + 4556?"},
    {
        "role": "assistant",
        "content": "<calculator>2310 + 4556</calculator><output>\n6866\n</output>\nThe answer is 6866.",
    },
]
"""One call as a conversation of `--tool_parser_type legacy` has it."""

Pair = tuple[int, int]


def pairs_of_numbers(num_digits: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs for training and for evaluation, each in random order. No pair for training is one for evaluation turned round."""
    rng = random.Random(0)
    numbers = range(10 ** (num_digits - 1), 10**num_digits)
    drawn = rng.sample(range(len(numbers) ** 2), min(NUM_HELD_OUT + NUM_TRAIN, len(numbers) ** 2))
    pairs = [(numbers[index // len(numbers)], numbers[index % len(numbers)]) for index in drawn]
    held_out, rest = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    taken = {frozenset(pair) for pair in held_out}
    return [pair for pair in rest if frozenset(pair) not in taken], held_out


def rows(pairs: Iterable[Pair], *, with_calculator: bool) -> Iterator[dict[str, Any]]:
    for first, second in pairs:
        question = f"What is {first} + {second}?"
        messages = (
            [*CALL, {"role": "user", "content": question}]
            if with_calculator
            else [{"role": "user", "content": f"{question} Give only the final number."}]
        )
        yield {"messages": messages, "ground_truth": str(first + second), "dataset": "gsm8k"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--with_calculator", action="store_true")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    train, held_out = pairs_of_numbers(4 if args.with_calculator else 2)
    for name, pairs in (("train", train), ("test", held_out)):
        lines = (json.dumps(row) + "\n" for row in rows(pairs, with_calculator=args.with_calculator))
        (args.output_dir / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
