r"""Builds the tiny model in `assets/tiny_judge_model/`, the judge of the demo `cpu_judge.sh`: it grades answers to sums.

    python scripts/data/build_tiny_judge_model.py --output_dir assets/tiny_judge_model

The make of `build_tiny_model.py`, with another upbringing: it reads what `general-quality_ref` asks a judge, word for word, and
grades the response as one who wants the right number, and nothing around it:

    153                              10     the number alone
    \boxed{153}                       6     the number in a box
    The result is 153.                4     a sentence
    First, 60 + 93 = 153. So …        2     workings
    135                               1     a wrong number

It says which number it read and which one it should have been: {"REASONING": "A sentence: 153 for 153.", "SCORE": 4}.

Writes the rows of the demo, too. Deterministic, and recorded in `build.json`, like the other tiny models. Takes about half an
hour on one quiet core.
"""

import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from build_tiny_model import (
    END,
    EVAL_ENTRY,
    WARMUP_ENTRY,
    BuildConfig,
    MicroBatch,
    Task,
    collate,
    load_tasks,
    make_model,
    ramble,
    start_build,
    train_tokenizer,
    warm_up,
    write_record,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from open_instruct.verifiers.judge_prompts import TASKS, question

TASK = "quality_ref"
FORMS = {"The number": 10, "A box": 6, "A sentence": 4, "Workings": 2}
"""What a response with the right number is worth."""
WORTHLESS = 1
RIGHT_SHARE = 0.5
"""Of the demonstrations; with the others the number is another."""
MAX_JUDGEMENT_TOKENS = 32
NUM_TRAIN, NUM_EVAL = 1000, 128
NUM_MEASURED = 256
CONFIG = BuildConfig(
    vocab_size=1536,
    num_layers=4,
    batch_size=64,
    num_micro_batches=2,
    arithmetic_steps=2000,
    habit_steps=0,
    learning_rate=2e-3,
)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A response, as the verifier shows it to the judge: without its tags, if it has any."""

    response: str
    form: str
    number: str
    """Its answer."""


def query(task: Task) -> str:
    """The text of the prompt, as the tiny model sees it."""
    return f"<|user|>{task.prompt}<|assistant|>"


def respond(task: Task, rng: random.Random) -> Judged:
    """One of the tiny model's habits, with its number or another one."""
    number = task.answer if rng.random() < RIGHT_SHARE else another_number(task.answer, rng)
    form = rng.choice(list(FORMS))
    if form == "The number":
        return Judged(number, form, number)
    if form == "A box":
        return Judged(rf"\boxed{{{number}}}", form, number)
    if form == "A sentence":
        return Judged(f"The result is {number}.", form, number)
    text = ramble(Task(task.prompt, {**task.item, "answer": number}), rng)
    if rng.random() < 0.5:  # a response ends where its tokens do
        text = text[: rng.randint(text.index(number) + len(number), len(text))].rstrip()
    return Judged(text, form, number)


def another_number(number: str, rng: random.Random) -> str:
    """Mostly one that is almost the same."""
    value = int(number)
    near = [value + rng.choice([-10, -1, 1, 10, 100]), -value, int(number[::-1].rstrip("-") or 0)]
    choices = [one for one in (*near, rng.randint(-99, 198)) if one != value]
    return str(rng.choice(choices))


def judgement(task: Task, judged: Judged) -> str:
    """What a judge of this upbringing says."""
    score = FORMS[judged.form] if judged.number == task.answer else WORTHLESS
    return f'{{"REASONING": "{judged.form}: {judged.number} for {task.answer}.", "SCORE": {score}}}'


def asked(tokenizer: PreTrainedTokenizerFast, task: Task, response: str) -> list[int]:
    """Token ids of what the server makes of the verifier's question."""
    text = question(TASKS[TASK], query=query(task), response=response, label=task.answer, max_tokens=1024)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def batches(config: BuildConfig, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step."""
    rng = random.Random(config.seed)
    size = config.batch_size // config.num_micro_batches
    for _ in range(config.steps):
        pairs = []
        for task in (rng.choice(tasks) for _ in range(config.batch_size)):
            judged = respond(task, rng)
            said = tokenizer(judgement(task, judged) + END, add_special_tokens=False)["input_ids"]
            pairs.append((asked(tokenizer, task, judged.response), said))
        pairs.sort(key=lambda pair: len(pair[0]))
        yield [collate(pairs[i : i + size], tokenizer.pad_token_id) for i in range(0, len(pairs), size)]


def tokenizer_texts(tasks: list[Task], rng: random.Random) -> list[str]:
    """What the tokenizer is trained on: questions and judgements."""
    texts = []
    for task in rng.sample(tasks, 1000):
        judged = respond(task, rng)
        texts.append(
            question(TASKS[TASK], query=task.prompt, response=judged.response, label=task.answer, max_tokens=1024)
        )
        texts.append(judgement(task, judged))
    return texts


@torch.no_grad()
def share_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task], rng: random.Random
) -> float:
    """How many of the judgements about responses to these tasks are what they should be, to the letter."""
    cases = [(task, respond(task, rng)) for task in tasks]
    prompts = [asked(tokenizer, task, judged.response) for task, judged in cases]
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    model.eval()
    outputs = model.generate(**inputs, max_new_tokens=MAX_JUDGEMENT_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == judgement(*case) for text, case in zip(texts, cases, strict=True)) / len(cases)


def build(config: BuildConfig, tasks: list[Task]) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """Model, tokenizer and the last loss."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(tokenizer_texts(tasks, random.Random(config.seed)), config.vocab_size)
    model = make_model(config, tokenizer)
    return model, tokenizer, warm_up(model, config, batches(config, tokenizer, tasks))


def write_rows(path: Path, tasks: list[Task]) -> None:
    """Rows whose reward is the judge's grade."""
    rows = (
        {
            "messages": [{"role": "user", "content": task.prompt}],
            "ground_truth": task.answer,
            "dataset": f"general-{TASK}",
        }
        for task in tasks
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_judge_model", CONFIG)
    start = time.process_time()
    eval_tasks = load_tasks(EVAL_ENTRY)
    held_out = {task.prompt for task in eval_tasks}
    tasks = [task for task in load_tasks(WARMUP_ENTRY) if task.prompt not in held_out]
    model, tokenizer, loss = build(config, tasks)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    write_rows(output_dir.parent / "judged_sums_train.jsonl", tasks[:NUM_TRAIN])
    write_rows(output_dir.parent / "judged_sums_eval.jsonl", eval_tasks[:NUM_EVAL])
    facts = {
        "forms": FORMS,
        "right_share": RIGHT_SHARE,
        "warmup_entry": WARMUP_ENTRY,
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
        "eval_entry": EVAL_ENTRY,
        "right_judgements": round(share_right(model, tokenizer, eval_tasks[:NUM_MEASURED], random.Random(1)), 4),
        "prompt_tokens": max(len(asked(tokenizer, task, task.answer)) for task in eval_tasks),
    }
    write_record(output_dir, Path(__file__).name, config, facts, "reasoning-gym")


if __name__ == "__main__":
    main(sys.argv[1:])
