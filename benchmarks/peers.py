"""TRL and this project in turns on the same work: model, prompts, lengths of responses, groups. Seconds of a step, wall and CPU.

    bash scripts/setup_peers.sh                                # TRL, in an environment of its own
    python benchmarks/peers.py                                 # five rounds of every kind of work: about two hours
    python benchmarks/peers.py --work heavy_tail --rounds 3 --ways trl one_ahead
    python scripts/data/get_smollm2.py --output_dir out/SmolLM2-135M-Instruct
    python benchmarks/peers.py --model out/SmolLM2-135M-Instruct --work fixed --rounds 3 --steps 4     # a real model

Each step takes 8 prompts with 8 responses of forced lengths: 64 tokens each, or log-normal by prompt (sigma 1, mean 48, at most
384), with a random model of 3.2 M parameters, or that of `--model`, in float32. TRL generates with Transformers and trains
micro-batches of 8. This project runs strictly on-policy, and one step ahead with `--streaming`; its engines compile the model and
reuse what prompts begin with in common, here also the system prompt. Ways that end in "_per_core" have a process with one thread
for each core (TRL: ranks; this project: learners and engines), among which the rows are divided; the others have one process of a
kind. The first steps of a run are warm-up. A step during which other programs used more than 5 % of the machine does not count.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import per_core_options

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "assets/tiny_model"
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=800&seed=7"
NUM_PROMPTS, GROUP_SIZE = 8, 8
NUM_WARM_UP = 3
OTHERS_AT_MOST = 0.05
"""Share of the machine that other programs may use in a step that counts."""
LIMIT_S = 900.0
"""Deadline of one run."""


@dataclass(frozen=True)
class Work:
    """What each step has to do."""

    length: int | None
    """Tokens of each response; None: log-normal."""
    longest: int
    long_prompts: bool = False
    """Prompts of about 512 tokens in place of 17."""

    def length_of(self, number: int) -> int:
        """Tokens of the responses to the prompt with this number, in the order in which prompts are taken."""
        if self.length is not None:
            return self.length
        mean, sigma = 48, 1.0
        drawn = np.random.default_rng([1, number]).lognormal(np.log(mean) - sigma**2 / 2, sigma)
        return int(np.clip(drawn, 2, self.longest))


WORK = {
    "fixed": Work(64, 64),
    "heavy_tail": Work(None, 384),
    "long_prompts": Work(64, 64, long_prompts=True),
}
NUM_CORES = len(os.sched_getaffinity(0))
WAYS = {
    "trl": [],
    "trl_per_core": [],
    "on_policy": ["--async_steps", "0"],
    "on_policy_per_core": ["--async_steps", "0", *per_core_options()],
    "one_ahead": ["--async_steps", "1", "--streaming"],
}
SYSTEM_PROMPT = " ".join(["Rule: add."] * 55)


class Meter:
    """Notes after each step what the clock, a program and the whole machine say."""

    def __init__(self, path: str, program: psutil.Process | None = None) -> None:
        """Args: program: counted with all that it started; None is this process."""
        self._file = Path(path).open("w")  # noqa: SIM115 - open as long as the process lives
        self._program = program or psutil.Process()

    def note(self) -> None:
        own = sum(_cpu_s(process) for process in [self._program, *self._program.children(recursive=True)])
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        row = {"wall": time.perf_counter(), "own": own, "machine": busy}
        print(json.dumps(row), file=self._file, flush=True)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def model_of(given: str | None, directory: str) -> str:
    return str(Path(given).absolute()) if given else build_model(directory)


def build_model(directory: str) -> str:
    """A random model of 3.2 M parameters, the same for both."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# --- this project -----------------------------------------------------------------------------------------------------


def run_ours(work: Work, way: str, num_steps: int, report: str, directory: str, model: str | None) -> int:
    from dataclasses import replace

    from open_instruct import grpo_fast
    from open_instruct.data_types import PromptRequest
    from open_instruct.rollouts.controller import Rollouter
    from open_instruct.run.fully_async_trainer import FullyAsyncTrainer

    meter = Meter(report)

    class MeteredTrainer(FullyAsyncTrainer):
        def begin_step(self, training_step: int, hooks: Any) -> Any:
            meter.note()
            return super().begin_step(training_step, hooks)

    class ForcedRollouter(Rollouter):
        _work = work

        def _custom_generation_logic(self, batch: list[PromptRequest]) -> list[PromptRequest]:
            return [self._with_length(request) for request in batch]

        def _with_length(self, request: PromptRequest) -> PromptRequest:
            length = self._work.length_of(int(request.prompt_id.rpartition("-")[2]))
            config = replace(request.generation_config, max_tokens=length, ignore_eos=True)
            return replace(request, generation_config=config)

    words = [
        "--model_name_or_path",
        model_of(model, f"{directory}_model"),
        "--dataset_mixer_list",
        SUMS,
        "1.0",
        "--output_dir",
        directory,
    ]
    words += ["--num_unique_prompts_rollout", str(NUM_PROMPTS), "--num_samples_per_prompt_rollout", str(GROUP_SIZE)]
    words += ["--max_prompt_token_length", "600" if work.long_prompts else "64" if model is None else "128"]
    words += ["--response_length", str(work.longest), "--pack_length", "2048", "--seed", "1", *WAYS[way]]
    words += [
        "--total_episodes",
        str((num_steps + NUM_WARM_UP + 1) * NUM_PROMPTS * GROUP_SIZE),
        "--learning_rate",
        "1e-6",
    ]
    words += ["--beta", "0", "--load_ref_policy", "False", "--filter_zero_std_samples", "False"]
    words += ["--checkpoint_state_freq", "-1", "--save_freq", "-1"]
    if work.long_prompts:
        prompt = Path(directory).with_suffix(".txt")
        prompt.write_text(SYSTEM_PROMPT)
        words += ["--system_prompt_override_file", str(prompt)]
    args, inputs = grpo_fast.read_options_and_data(words)
    return grpo_fast.run(args, inputs, grpo_fast.Roles(trainer=MeteredTrainer, rollouter=ForcedRollouter))


# --- TRL --------------------------------------------------------------------------------------------------------------


def run_trl(work: Work, num_steps: int, report: str, directory: str, given_model: str | None) -> int:
    """Runs in `.venv-peers`, alone or as one of the ranks that torch's launcher started."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    directory, report = f"{directory}{rank}", f"{report}{rank or ''}"
    torch.set_num_threads(max(1, NUM_CORES // num_ranks))
    path = model_of(given_model, f"{directory}_model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generate = forced_generate(model.generate, work, tokenizer.eos_token_id, rank)
    meter = Meter(report, psutil.Process().parent() if num_ranks > 1 else None)

    class Metered(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.note()

    config = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=NUM_PROMPTS // num_ranks,
        num_generations=GROUP_SIZE,
        max_completion_length=work.longest,
        max_steps=num_steps + NUM_WARM_UP + 1,
        learning_rate=1e-6,
        beta=0.0,
        use_cpu=True,
        ddp_backend="gloo" if num_ranks > 1 else None,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10**6,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(number % 2) for number in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts_as_text(work, tokenizer)}),
        processing_class=tokenizer,
        callbacks=[Metered()],
    )
    trainer.train()
    return 0


def prompts_as_text(work: Work, tokenizer: Any) -> list[str]:
    from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows

    system = [{"role": "system", "content": SYSTEM_PROMPT}] if work.long_prompts else []
    conversations = [[*system, *row["messages"]] for row in reasoning_gym_rows(SUMS)]
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in conversations]


def forced_generate(generate: Callable[..., Any], work: Work, end_id: int, rank: int) -> Callable[..., Any]:
    """`generate` with the lengths of `work`: its n-th call is for this rank's share of the n-th `NUM_PROMPTS` prompts."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class EndsAt(LogitsProcessor):
        """Every row ends after its own number of tokens, and not before."""

        def __init__(self, num_prompt_tokens: int, lengths: list[int]) -> None:
            self._start, self._lengths = num_prompt_tokens, torch.tensor(lengths)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_last = input_ids.shape[1] - self._start + 1 >= self._lengths
            of_end = scores[:, end_id].clone()
            scores = scores.masked_fill(is_last[:, None], -torch.inf)
            scores[:, end_id] = torch.where(is_last, of_end, -torch.inf)
            return scores

    calls = itertools.count()

    def generate_forced(input_ids: torch.Tensor, **options: Any) -> Any:
        first = next(calls) * NUM_PROMPTS + rank * (len(input_ids) // GROUP_SIZE)
        lengths = [work.length_of(first + row // GROUP_SIZE) for row in range(len(input_ids))]
        ends = LogitsProcessorList([EndsAt(input_ids.shape[1], lengths)])
        return generate(input_ids=input_ids, logits_processor=ends, **options)

    return generate_forced


# --- in turns ---------------------------------------------------------------------------------------------------------


def steps_of(report: Path) -> Iterator[tuple[float, float]]:
    """Seconds and CPU-seconds of each step that counts."""
    rows = [json.loads(line) for line in report.read_text().splitlines()][NUM_WARM_UP:]
    for before, after in pairwise(rows):
        wall, own, machine = (after[name] - before[name] for name in ("wall", "own", "machine"))
        if machine - own <= OTHERS_AT_MOST * wall * NUM_CORES:
            yield wall, own


def measure(work: str, way: str, num_steps: int, model: str | None) -> list[tuple[float, float]]:
    python = ROOT / (".venv-peers" if way.startswith("trl") else ".venv") / "bin/python"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NUM_CORES)]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "steps.jsonl"
        words = [str(python), *(launcher if way == "trl_per_core" else []), __file__]
        words += ["--role", way, "--work", work, "--steps", str(num_steps)]
        words += ["--report", str(report), "--directory", f"{directory}/run"]
        words += ["--model", model] if model else []
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        env.pop("OMP_NUM_THREADS", None)
        done = subprocess.run(words, env=env, timeout=LIMIT_S, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{way} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return list(steps_of(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--model", help="directory of a model, in place of the random one")
    parser.add_argument("--json", help="file for the table")
    for name in ("role", "report", "directory"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role in ("trl", "trl_per_core"):
        sys.exit(run_trl(WORK[args.work[0]], args.steps, args.report, args.directory, args.model))
    if args.role is not None:
        sys.exit(run_ours(WORK[args.work[0]], args.role, args.steps, args.report, args.directory, args.model))
    from benchmarks.report import print_table, write_json

    table = []
    for work in args.work:
        runs: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in args.ways}
        for _ in range(args.rounds):
            for way in args.ways:
                runs[way].append(measure(work, way, args.steps, args.model))
        table += list(summaries(work, runs))
    print_table(table)
    write_json(args.json, table)


def summaries(work: str, runs: dict[str, list[list[tuple[float, float]]]]) -> Iterator[dict[str, Any]]:
    """A row for each way. Medians over the steps of a run; over the rounds the median, the lowest and the highest.

    `times_trl` compares with the faster of TRL's ways.
    """
    walls = {
        way: sorted(median(wall for wall, _ in steps) for steps in rounds if steps) for way, rounds in runs.items()
    }
    trl = [median(walls[way]) for way in runs if way.startswith("trl") and walls[way]]
    for way, rounds in runs.items():
        if not walls[way]:
            sys.exit(f"{work}, {way}: other programs disturbed every step. Run it on a quiet machine.")
        cpu = sorted(median(own for _, own in steps) for steps in rounds if steps)
        yield {
            "work": work,
            "way": way,
            "s_per_step": median(walls[way]),
            "lowest": walls[way][0],
            "highest": walls[way][-1],
            "mean_s": mean(wall for steps in rounds for wall, _ in steps),
            "cpu_s": median(cpu),
            "steps": sum(map(len, rounds)),
            "times_trl": min(trl) / median(walls[way]) if trl else None,
        }


if __name__ == "__main__":
    main()
