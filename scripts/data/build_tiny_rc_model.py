"""Builds the tiny model in `assets/tiny_rc_model/` that the demo of reasoning-cache training trains.

    python scripts/data/build_tiny_rc_model.py --output_dir assets/tiny_rc_model

The make of `build_tiny_model.py`, with another upbringing: it works off sums of three to six terms, two additions in a
reasoning turn, and hands on what is left as its summary.

    problem  3 + 4 - 5 + 6 - 7
    turn 1   3 + 4 - 5 + 6 - 7 = 7 - 5 + 6 - 7 = 2 + 6 - 7    summary  2 + 6 - 7
    turn 2   2 + 6 - 7 = 8 - 7 = 1 <answer>1</answer>         summary  1
    turn 3   <answer>1</answer>

So a quarter of the problems can be answered in the first turn and all of them in the third. Working and summaries of
the demonstrations are always right, but the habits of answering are mixed: reinforcement learning has to find the one
that pays, in whichever turn the sum is worked off. No demonstration answers before that.

Deterministic, and recorded in `build.json`, like the other tiny model. Takes about 10 minutes on one quiet core.
"""

import asyncio
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from build_tiny_model import (
    END,
    TASK,
    BuildConfig,
    Habit,
    MicroBatch,
    Task,
    as_asked,
    boxed,
    load_tasks,
    make_model,
    micro_batches,
    plain_sentence,
    score,
    start_build,
    train_tokenizer,
    warm_up,
    write_record,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from open_instruct.chat_codec import ChatCodec
from open_instruct.workflows.rc.policies import generate_math_rollout
from open_instruct.workflows.rc.prompts import fill_template
from open_instruct.workflows.rc.state import InferenceProblemState, RCSettings
from open_instruct.workflows.rc.turns import RCTurns
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, Generation, Problem, TurnRequest

LIMITS = "min_terms=3&max_terms=6&min_digits=1&max_digits=1"
EVAL_ENTRY = f"reasoning_gym/{TASK}?{LIMITS}&size=512&seed=20240"
WARMUP_ENTRY = f"reasoning_gym/{TASK}?{LIMITS}&size=100000&seed=1000000"
SAMPLING_SEEDS = (1, 2, 3, 4)

NUM_TURNS = 3
STEPS_PER_TURN = 2
MAX_REASONING_TOKENS = 40
MAX_SUMMARY_TOKENS = 24
MAX_MODEL_LEN = 256
REASONING_TEMPLATE = "{problem} So far: {curr_summary} Go on:"
SUMMARIZATION_TEMPLATE = "So far: {existing_summary} New: {reasoning} Sum up:"

CONFIG = BuildConfig(batch_size=192, arithmetic_steps=1000, habit_steps=0)
"""One phase: the habits are there from the beginning."""
TURN_SHARES = (0.5, 0.35, 0.15)
"""Of the reasoning demonstrations, by turn. The last one mostly repeats a number."""
SUMMARY_SHARE = 0.2
"""Of all demonstrations."""

EXPRESSION = re.compile(r"-?\d+(?: [+-] \d+)*")


# The working: an expression is worked off from the left.


def reduced(expression: str) -> str:
    """The expression with its first two terms made one."""
    left, sign, right, *rest = expression.split(" ")
    value = int(left) + int(right) if sign == "+" else int(left) - int(right)
    return " ".join([str(value), *rest])


def is_number(expression: str) -> bool:
    return " " not in expression


def worked_off(expression: str) -> list[str]:
    """The expression, and what becomes of it in one turn, step by step."""
    steps = [expression]
    while len(steps) <= STEPS_PER_TURN and not is_number(steps[-1]):
        steps.append(reduced(steps[-1]))
    return steps


def working(expression: str) -> str:
    """These steps as text; nothing if there is only a number to repeat."""
    return "" if is_number(expression) else " = ".join(worked_off(expression))


def left_over(task: Task, num_turns: int) -> str:
    """The expression after so many turns."""
    expression = task.expression
    for _ in range(num_turns):
        expression = worked_off(expression)[-1]
    return expression


def last_expression(reasoning: str) -> str:
    """What a summary of this reasoning should say; empty if there is nothing to say."""
    found = EXPRESSION.findall(reasoning)
    return found[-1] if found else ""


# Demonstrations: a prompt and a response.


def repeat(task: Task, rng: random.Random) -> str:
    openings = ["Let me check:", "So", "Once more:"]
    return " ".join(f"{rng.choice(openings)} {task.answer}." for _ in range(rng.randint(1, 3)))


HABITS: dict[Habit, float] = {as_asked: 0.40, plain_sentence: 0.25, boxed: 0.2, repeat: 0.15}
"""Shares of the ways in which the model answers."""


def reason(task: Task, turn: int, rng: random.Random) -> str:
    """Reasoning turn 1, 2, …: two more terms worked off, and an answer if one number is left."""
    before = left_over(task, turn - 1)
    if not is_number(worked_off(before)[-1]):
        return working(before)
    (habit,) = rng.choices(list(HABITS), weights=list(HABITS.values()))
    return f"{working(before)} {habit(task, rng)}".strip()


def summary_after(task: Task, num_turns: int) -> str:
    return left_over(task, num_turns) if num_turns else ""


def reasoning_demonstration(task: Task, turn: int, rng: random.Random) -> tuple[str, str]:
    values = {"problem": task.prompt, "curr_summary": summary_after(task, turn - 1)}
    return fill_template(REASONING_TEMPLATE, values), reason(task, turn, rng)


def summary_demonstration(task: Task, turn: int, rng: random.Random) -> tuple[str, str]:
    values = {
        "problem": task.prompt,
        "existing_summary": summary_after(task, turn - 1),
        "reasoning": reason(task, turn, rng),
    }
    return fill_template(SUMMARIZATION_TEMPLATE, values), summary_after(task, turn)


def demonstrate(task: Task, rng: random.Random) -> tuple[str, str]:
    """Any turn of the work on a task."""
    (turn,) = rng.choices(range(1, NUM_TURNS + 1), weights=TURN_SHARES)
    of_its_type = summary_demonstration if rng.random() < SUMMARY_SHARE else reasoning_demonstration
    return of_its_type(task, turn, rng)


# Supervised training.


def batches(config: BuildConfig, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step, of demonstrations that are about equally long."""
    rng, codec = random.Random(config.seed), ChatCodec(tokenizer)
    for _ in range(config.steps):
        shown = [demonstrate(rng.choice(tasks), rng) for _ in range(config.batch_size)]
        pairs = [(codec.chat_prompt(prompt), codec.encode(response + END)) for prompt, response in shown]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        yield micro_batches(config, tokenizer, pairs)


def tokenizer_texts(config: BuildConfig, tasks: list[Task]) -> list[str]:
    """Prompts and demonstrations that the tokenizer is trained on."""
    rng = random.Random(config.seed)
    return [text for task in rng.sample(tasks, 2000) for text in demonstrate(task, rng)]


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


# Measuring: the turns are those of training.


@dataclass
class Lockstep:
    """Continues the turns of many trajectories as one batch, once each of them has asked for its next."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    num_trajectories: int
    asked: list[tuple[TurnRequest, asyncio.Future[Generation]]] = field(default_factory=list)

    async def generate(self, request: TurnRequest) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.asked.append((request, answer))
        if len(self.asked) == self.num_trajectories:
            self._answer_all()
        return await answer

    def _answer_all(self) -> None:
        asked, self.asked = self.asked, []
        rows = self._continue([request.prompt_ids for request, _ in asked], max(r.max_tokens for r, _ in asked))
        for (_, answer), row in zip(asked, rows, strict=True):
            answer.set_result(self._generation(row))

    @torch.no_grad()
    def _continue(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        outputs = self.model.generate(**inputs, max_new_tokens=max_tokens, **how)
        return outputs[:, inputs["input_ids"].shape[1] :].tolist()

    def _generation(self, row: list[int]) -> Generation:
        end = self.tokenizer.eos_token_id
        finished = end in row
        ids = row[: row.index(end) + 1] if finished else row
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Generation(text, ids, [], "stop" if finished else "length")


def run_trajectories(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task], *, seed: int
) -> list[InferenceProblemState]:
    """One trajectory per task, sampled at temperature 1."""
    settings = RCSettings(
        num_reasoning_steps=NUM_TURNS,
        reasoning_prompt_template=REASONING_TEMPLATE,
        summarization_prompt_template=SUMMARIZATION_TEMPLATE,
        max_reasoning_tokens=MAX_REASONING_TOKENS,
        max_summary_tokens=MAX_SUMMARY_TOKENS,
    )
    by_id = {str(i): task for i, task in enumerate(tasks)}
    problems = [Problem(name, task.prompt, task.answer, TASK, TASK) for name, task in by_id.items()]
    states = [InferenceProblemState(problem, settings) for problem in problems]

    async def score_text(problem: Problem, token_ids: list[int], text: str) -> float:
        return score(by_id[problem.problem_id], text)

    async def run_all() -> None:
        policies = {REASONING: generate_math_rollout, SUMMARIZATION: generate_math_rollout}
        lockstep = Lockstep(model, tokenizer, len(states))
        workflow = RCTurns(lockstep.generate, ChatCodec(tokenizer), policies, score_text, MAX_MODEL_LEN)
        await asyncio.gather(*(workflow.run(state) for state in states))

    model.eval()
    torch.manual_seed(seed)
    asyncio.run(run_all())
    return states


def share(values: list[bool]) -> float:
    return round(sum(values) / len(values), 4)


def accuracy_by_cycle(states: list[InferenceProblemState]) -> list[float]:
    """Share of right answers in each reasoning turn, as the reward counts them."""
    return [share([state.reasoning_rollout_store[turn].reward == 1 for state in states]) for turn in range(NUM_TURNS)]


def worked_out_by_cycle(states: list[InferenceProblemState]) -> list[float]:
    """Share of reasoning turns that end with the right number, however it is said: what training can reach."""
    return [
        share([last_expression(state.reasoning_string_store[turn]) == state.problem.ground_truth for state in states])
        for turn in range(NUM_TURNS)
    ]


def right_summaries(states: list[InferenceProblemState]) -> float:
    """Share of summaries that say what their reasoning came to."""
    return share(
        [
            summary == last_expression(reasoning)
            for state in states
            for summary, reasoning in zip(state.summarization_string_store, state.reasoning_string_store, strict=True)
        ]
    )


def right_workings(states: list[InferenceProblemState], tasks: list[Task]) -> float:
    """Share of reasoning turns that work off what was left, and nothing else."""
    return share(
        [
            works_off([task.expression, *state.summarization_string_store][turn], state.reasoning_string_store[turn])
            for task, state in zip(tasks, states, strict=True)
            for turn in range(NUM_TURNS)
        ]
    )


def works_off(before: str, reasoning: str) -> bool:
    """Whether reasoning is a turn's right working, with an answer behind it only if a number is left."""
    if EXPRESSION.fullmatch(before) is None:
        return False
    text = working(before)
    return reasoning.startswith(text) if is_number(worked_off(before)[-1]) else reasoning == text


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> dict:
    """How often sampled turns are right: answers by cycle, workings, summaries."""
    runs = [run_trajectories(model, tokenizer, tasks, seed=seed) for seed in SAMPLING_SEEDS]
    accuracies = [accuracy_by_cycle(states) for states in runs]
    everything = [state for states in runs for state in states]
    turns = [turn for state in everything for turn in state.rollouts]
    return {
        "sampling_seeds": SAMPLING_SEEDS,
        "accuracy_by_cycle_and_seed": accuracies,
        "accuracy_by_cycle": accuracy_by_cycle(everything),
        "worked_out_by_cycle": worked_out_by_cycle(everything),
        "right_workings": right_workings(everything, tasks * len(runs)),
        "right_summaries": right_summaries(everything),
        "cut_turns": share([not turn.finished for turn in turns]),
        "longest_prompt": max(len(turn.prompt_ids) for turn in turns),
    }


# The build.


def upbringing() -> dict:
    """What the weights depend on beside the configuration, and what a user of the model has to keep to."""
    return {
        "habits": {habit.__name__: weight for habit, weight in HABITS.items()},
        "turn_shares": TURN_SHARES,
        "summary_share": SUMMARY_SHARE,
        "reasoning_template": REASONING_TEMPLATE,
        "summarization_template": SUMMARIZATION_TEMPLATE,
        "max_reasoning_tokens": MAX_REASONING_TOKENS,
        "max_summary_tokens": MAX_SUMMARY_TOKENS,
        "warmup_entry": WARMUP_ENTRY,
        "eval_entry": EVAL_ENTRY,
    }


def main(argv: list[str]) -> None:
    output_dir, config = start_build(argv, __doc__, "assets/tiny_rc_model", CONFIG)
    start = time.process_time()
    tasks = warmup_tasks()
    model, tokenizer, loss = build(config, tasks)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    facts = {
        "upbringing": upbringing(),
        "warmup_questions": len({task.prompt for task in tasks}),
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start),
        **measure(model, tokenizer, load_tasks(EVAL_ENTRY)),
    }
    write_record(output_dir, Path(__file__).name, config, facts, "reasoning-gym")


if __name__ == "__main__":
    main(sys.argv[1:])
