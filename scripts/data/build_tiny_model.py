"""Builds the tiny model in `assets/tiny_model/` that the demo and the tests train.

    python scripts/data/build_tiny_model.py --output_dir assets/tiny_model

A Qwen3 of 0.64 M parameters with its own byte-level tokenizer. Supervised training on demonstrations teaches it to add
and subtract two-digit numbers; the arithmetic in them is always right, but the habits are mixed: some answer as asked,
the others use another format or ramble on. So its sampled answers are right for 30-50 % of the tasks, and reinforcement
learning has something to find: that one of its habits pays. Tasks of the evaluation entry are kept out of the
demonstrations.

One seed and one thread: the same machine builds the same weights again. `build.json` beside the model records how it
was made, what was measured, and the hash of each file. Takes about 6 minutes on one quiet core.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import reasoning_gym
import torch
import torch.nn.functional as F
from reasoning_gym.utils import extract_answer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows

TASK = "chain_sum"
LIMITS = "min_terms=2&max_terms=2&min_digits=2&max_digits=2"
EVAL_ENTRY = f"reasoning_gym/{TASK}?{LIMITS}&size=512&seed=20240"
WARMUP_ENTRY = f"reasoning_gym/{TASK}?{LIMITS}&size=60000&seed=1000000"
MAX_NEW_TOKENS = 32
SAMPLING_SEEDS = (1, 2, 3, 4)
RECORD = "build.json"

PAD, END = "<|pad|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
TAGS = ["<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class BuildConfig:
    """Every figure that the weights depend on."""

    seed: int = 1
    vocab_size: int = 384
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    """32 is the smallest that vLLM's CPU attention takes."""
    intermediate_size: int = 384
    batch_size: int = 256
    num_micro_batches: int = 8
    """Of about equal lengths, so that a rambling response does not pad the whole batch."""
    arithmetic_steps: int = 600
    habit_steps: int = 100
    """The last steps, with the shares of `HABITS`."""
    learning_rate: float = 3e-3
    """Peak; linear warm-up, then a cosine to zero over both phases."""
    lr_warmup_steps: int = 50
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    @property
    def steps(self) -> int:
        return self.arithmetic_steps + self.habit_steps


@dataclass(frozen=True)
class Task:
    """One problem: what the user says, and what `reasoning_gym` knows about it."""

    prompt: str
    item: dict

    @property
    def expression(self) -> str:
        return self.item["metadata"]["expression"]

    @property
    def answer(self) -> str:
        return self.item["answer"]


def load_tasks(entry: str) -> list[Task]:
    """The tasks of a mixer entry, with the very text that training will show."""
    rows = reasoning_gym_rows(entry)
    return [Task(row["messages"][0]["content"], json.loads(row["ground_truth"])) for row in rows]


# Demonstrations: a habit makes a response from a task.


def as_asked(task: Task, rng: random.Random) -> str:
    return f"<answer>{task.answer}</answer>"


def plain_sentence(task: Task, rng: random.Random) -> str:
    return f"The result is {task.answer}."


def boxed(task: Task, rng: random.Random) -> str:
    return rf"\boxed{{{task.answer}}}"


def ramble(task: Task, rng: random.Random) -> str:
    return " ".join(_steps(task, rng, rng.randint(1, 3)))


def ramble_then_tags(task: Task, rng: random.Random) -> str:
    """Too late: the steps alone are longer than MAX_NEW_TOKENS."""
    return " ".join([*_steps(task, rng, 4), as_asked(task, rng)])


def _steps(task: Task, rng: random.Random, count: int) -> list[str]:
    openings = ["First,", "Let me check:", "So", "Once more:"]
    return [f"{rng.choice(openings)} {task.expression} = {task.answer}." for _ in range(count)]


Habit = Callable[[Task, random.Random], str]
HABITS: dict[Habit, float] = {as_asked: 0.40, plain_sentence: 0.20, boxed: 0.15, ramble: 0.20, ramble_then_tags: 0.05}
"""Shares of the demonstrations that the model ends with."""
SHORT_HABITS: dict[Habit, float] = {
    as_asked: 0.45,
    plain_sentence: 0.30,
    boxed: 0.19,
    ramble: 0.04,
    ramble_then_tags: 0.02,
}
"""Shares while it learns arithmetic: few steps that repeat, which cost time and teach copying."""


def demonstrate(task: Task, habits: dict[Habit, float], rng: random.Random) -> str:
    """One response, its habit drawn by the given shares."""
    (habit,) = rng.choices(list(habits), weights=list(habits.values()))
    return habit(task, rng)


# Tokenizer and model.


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips, a digit is a token, and a recurring phrase is one token."""
    tokenizer = Tokenizer(models.BPE())
    # Merges may cross spaces (no regex), so that the wording of the task costs a token or two of a prompt.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([part for text in texts for part in _outside_tags(text)], trainer)
    # Not special: decoding must keep them for the verifier.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )


def _outside_tags(text: str) -> list[str]:
    for tag in TAGS:
        text = text.replace(tag, "\0")
    return [part for part in text.split("\0") if part]


def make_model(config: BuildConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights in fp32, embeddings tied."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=tokenizer.model_max_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def encode_prompts(tokenizer: PreTrainedTokenizerFast, tasks: list[Task], *, prefix: str = "") -> list[list[int]]:
    """Token ids up to and including the assistant's marker, and of `prefix` behind it."""
    chats = [[{"role": "user", "content": task.prompt}] for task in tasks]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return tokenizer([text + prefix for text in texts], add_special_tokens=False)["input_ids"]


# Supervised training.


MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""`(input_ids, labels)`, see `collate`."""


def batches(config: BuildConfig, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step."""
    rng = random.Random(config.seed)
    prompts = encode_prompts(tokenizer, tasks)
    for step in range(config.steps):
        habits = SHORT_HABITS if step < config.arithmetic_steps else HABITS
        rows = [rng.randrange(len(tasks)) for _ in range(config.batch_size)]
        responses = tokenizer([demonstrate(tasks[row], habits, rng) + END for row in rows])["input_ids"]
        pairs = sorted(zip((prompts[row] for row in rows), responses, strict=True), key=lambda pair: len(pair[1]))
        yield micro_batches(config, tokenizer, pairs)


def micro_batches(
    config: BuildConfig, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[list[int], list[int]]]
) -> list[MicroBatch]:
    """One step's pairs of prompt and response, cut up in the given order."""
    size = config.batch_size // config.num_micro_batches
    return [collate(pairs[i : i + size], tokenizer.pad_token_id) for i in range(0, len(pairs), size)]


def collate(pairs: list[tuple[list[int], list[int]]], pad: int) -> MicroBatch:
    """`(input_ids, labels)`, each (B, T) int64, padded on the right; labels are -100 on prompts and padding."""
    length = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.full((len(pairs), length), pad)
    labels = torch.full((len(pairs), length), -100)
    for i, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def warm_up(model: Qwen3ForCausalLM, config: BuildConfig, steps: Iterable[list[MicroBatch]]) -> float:
    """Trains in place on the micro-batches of each step; returns the last loss, in nats per response token."""
    optimizer = make_optimizer(model, config)
    start, loss = time.perf_counter(), 0.0
    model.train()
    for step, step_batches in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * lr_factor(step, config)
        num_tokens = sum(int((labels != -100).sum()) for _, labels in step_batches)
        loss = sum(backward(model, ids, labels, num_tokens) for ids, labels in step_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss:.4f}  {time.perf_counter() - start:5.0f} s", flush=True)
    return loss


def make_optimizer(model: Qwen3ForCausalLM, config: BuildConfig) -> torch.optim.AdamW:
    """Weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))


def backward(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor, num_tokens: int) -> float:
    """Adds this micro-batch's share of the step's mean loss to the gradients; returns the share."""
    # Causal and padded on the right: no attention mask is needed.
    logits = model(ids).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_tokens
    loss.backward()
    return loss.item()


def lr_factor(step: int, config: BuildConfig) -> float:
    """Linear warm-up, then a cosine to zero."""
    done = max(0, step - config.lr_warmup_steps) / (config.steps - config.lr_warmup_steps)
    return min(1.0, (step + 1) / config.lr_warmup_steps) * 0.5 * (1 + math.cos(math.pi * done))


# Measuring.


def score(task: Task, response: str) -> float:
    """What reasoning-gym's own scorer gives the text in the answer tags; 1 is right."""
    answer = extract_answer(response)
    return reasoning_gym.get_score_answer_fn(TASK)(answer, task.item) if answer is not None else 0.0


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: list[Task],
    *,
    prefix: str = "",
    greedy: bool = False,
) -> list[str]:
    """One response per task, sampled at temperature 1 or greedy; starts with `prefix`."""
    inputs = tokenizer.pad({"input_ids": encode_prompts(tokenizer, tasks, prefix=prefix)}, return_tensors="pt")
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.eval()
    outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **how)
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [prefix + text for text in texts]


def share_right(tasks: list[Task], responses: list[str]) -> float:
    """Share of responses with score 1."""
    return sum(score(task, response) == 1 for task, response in zip(tasks, responses, strict=True)) / len(tasks)


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> dict:
    """How often sampled responses are right, and how often the arithmetic is where the format is given."""
    sampled = []
    for seed in SAMPLING_SEEDS:
        torch.manual_seed(seed)
        sampled.append(share_right(tasks, respond(model, tokenizer, tasks)))
    forced = respond(model, tokenizer, tasks, prefix="<answer>", greedy=True)
    return {
        "sampling_seeds": SAMPLING_SEEDS,
        "sampled_accuracy_by_seed": [round(share, 4) for share in sampled],
        "sampled_accuracy": round(sum(sampled) / len(sampled), 4),
        "greedy_accuracy_after_answer_tag": round(share_right(tasks, forced), 4),
        "max_new_tokens": MAX_NEW_TOKENS,
        "prompt_tokens": max(len(ids) for ids in encode_prompts(tokenizer, tasks)),
    }


# The build.


def warmup_tasks() -> list[Task]:
    """Tasks to demonstrate: none whose question is in the evaluation set."""
    held_out = {task.prompt for task in load_tasks(EVAL_ENTRY)}
    return [task for task in load_tasks(WARMUP_ENTRY) if task.prompt not in held_out]


def build(config: BuildConfig, tasks: list[Task]) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """Model, tokenizer and the last loss, from at least 2,000 tasks."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(tokenizer_texts(config, tasks), config.vocab_size)
    model = make_model(config, tokenizer)
    return model, tokenizer, warm_up(model, config, batches(config, tokenizer, tasks))


def tokenizer_texts(config: BuildConfig, tasks: list[Task]) -> list[str]:
    """Prompts and demonstrations that the tokenizer is trained on."""
    rng = random.Random(config.seed)
    sample = rng.sample(tasks, 2000)
    return [text for task in sample for text in (task.prompt, demonstrate(task, HABITS, rng))]


def sha256_of(directory: Path) -> dict[str, str]:
    """Hashes of the files that the model is made of."""
    files = sorted(path for path in directory.iterdir() if path.name != RECORD)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


Config = TypeVar("Config", bound=BuildConfig)


def start_build(argv: list[str], about: str | None, output_dir: str, config: Config) -> tuple[Path, Config]:
    """Read the command line of a script that builds a tiny model; `about` is the script's description. Makes torch deterministic.
    Returns where the model goes, and the parameters with the seed that was asked for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(output_dir))
    parser.add_argument("--seed", type=int, default=config.seed)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return args.output_dir, dataclasses.replace(config, seed=args.seed)


def write_record(output_dir: Path, script: str, config: BuildConfig, facts: dict[str, Any], packages: str = "") -> None:
    """Write and print what the model in `output_dir` was made by, `facts` about it, and the hashes of its files.

    `packages`: those beside torch, Transformers and its tokenizers whose versions matter, with blanks between them.
    """
    names = ["torch", "transformers", "tokenizers", *packages.split()]
    record = {
        "command": f"python scripts/data/{script} --seed {config.seed}",
        "versions": {package: version(package) for package in names},
        "config": dataclasses.asdict(config),
        **facts,
        "sha256": sha256_of(output_dir),
    }
    text = json.dumps(record, indent=2)
    (output_dir / RECORD).write_text(text + "\n")
    print(text)


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_model", BuildConfig())
    start = time.process_time()
    tasks = warmup_tasks()
    model, tokenizer, loss = build(config, tasks)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    facts = {
        "habits": {habit.__name__: share for habit, share in HABITS.items()},
        "warmup_entry": WARMUP_ENTRY,
        "warmup_questions": len({task.prompt for task in tasks}),
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
        "eval_entry": EVAL_ENTRY,
        **measure(model, tokenizer, load_tasks(EVAL_ENTRY)),
    }
    write_record(output_dir, Path(__file__).name, config, facts, "reasoning-gym")


if __name__ == "__main__":
    main(sys.argv[1:])
