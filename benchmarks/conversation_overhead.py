"""How busy an engine stays while its conversations wait for their environments: against single turns of the same tokens.

    python benchmarks/conversation_overhead.py
    python benchmarks/conversation_overhead.py --rounds 1 --conversations 400 --json out/conversations.json

One engine actor in this process, with a small model of random weights that never ends a turn by itself. In turns:

    single turns    so many responses at once, each of turns x tokens
    conversations   so many at once, each with that many turns, and an environment, in a process of its own, that sleeps for
                    0.1 to 2 s before it answers a turn. Environments are made, reset and closed for each conversation

Both have as many responses under way at once; who ends makes room for the next. Measured in the middle third of the results,
where neither begins nor runs dry: the share of the time that the engine spends in its steps, and sampled tokens per second.
"""

import argparse
import os
import queue
import shutil
import statistics
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rc_overhead import make_untrained
from benchmarks.report import print_table, write_json

ROOT = Path(__file__).parents[1]
GROUP = 8
PROMPT = 24
"""Tokens of a prompt."""
LIMIT_S = 600.0
SLEEPER = '''
    """Sleeps before it answers, and ends the episode after so many turns."""

    import asyncio
    import random

    from open_instruct.environments.base import ENVIRONMENTS, Environment, Observation, Opening, user_message


    @ENVIRONMENTS.register("sleeper")
    class Sleeper(Environment):
        takes_text = True

        def __init__(self, num_turns: int = 4) -> None:
            self.num_turns, self.random = num_turns, random.Random()

        async def reset(self, task, seed):
            self.left = self.num_turns
            self.random.seed()
            return Opening()

        async def step(self, turn):
            self.left -= 1
            await asyncio.sleep(self.random.uniform(0.1, 2.0))
            return Observation([] if not self.left else [user_message("12 + 34 =")], None, not self.left)
'''


class LocalQueue:
    """A Ray queue in this process."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any, timeout: float | None = None) -> None:
        self._items.put(item)

    def get(self, timeout: float) -> Any:
        from ray.util.queue import Empty

        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            raise Empty from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=200, help="at once; a multiple of 8")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each turn")
    parser.add_argument("--waves", type=int, default=6, help="how often as many are begun in all")
    parser.add_argument("--model", default=str(ROOT / "assets" / "tiny_model"), help="whose architecture is taken")
    parser.add_argument("--json", help="write the rows there")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    try:
        model = make_untrained(arguments.model, str(directory / "model"))
        (directory / "sleeper.py").write_text(textwrap.dedent(SLEEPER))
        rows: list[dict[str, Any]] = [
            {"round": number, "work": work, **measure(arguments, model, directory, work)}
            for number in range(arguments.rounds)
            for work in ("single turns", "conversations")
        ]
    finally:
        shutil.rmtree(directory)
    print_table(rows)
    for name in ("busy", "tokens_per_s"):
        of = {work: [row[name] for row in rows if row["work"] == work] for work in ("single turns", "conversations")}
        ratios = [one / other for one, other in zip(of["conversations"], of["single turns"], strict=True)]
        print(
            f"{name}: conversations / single turns {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        )
    write_json(arguments.json, rows)


def measure(arguments: argparse.Namespace, model: str, directory: Path, work: str) -> dict[str, float]:
    """Shares and rates in the middle third of the results."""
    num_rollouts = arguments.conversations * arguments.waves // GROUP
    with engine(arguments, model, directory, work) as (actor, prompts, results):
        for number in range(arguments.conversations // GROUP):
            prompts.put([request(arguments, work, number)])
        marks: list[dict[str, float]] = []
        for number in range(num_rollouts):
            (result, *others) = results.get(timeout=LIMIT_S)
            assert not result.error, result.error
            for other in others:  # results that came meanwhile are looked at in the next rounds
                results.put([other])
            following = number + arguments.conversations // GROUP
            if following < num_rollouts:
                prompts.put([request(arguments, work, following)])
            if number in (num_rollouts // 3, 2 * num_rollouts // 3):
                marks.append(account(actor))
    begin, end = marks
    seconds = end["at"] - begin["at"]
    return {
        "busy": (end["busy_s"] - begin["busy_s"]) / seconds,
        "tokens_per_s": (end["tokens"] - begin["tokens"]) / seconds,
        "cpu_s_per_1000_tokens": 1000 * (end["cpu_s"] - begin["cpu_s"]) / (end["tokens"] - begin["tokens"]),
        "seconds": seconds,
    }


def account(actor: Any) -> dict[str, float]:
    status = actor.take_inventory()
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    return {
        "at": time.perf_counter(),
        "busy_s": status["busy_s"],
        "tokens": status["num_generated_tokens"],
        "cpu_s": cpu_s,
    }


def request(arguments: argparse.Namespace, work: str, number: int) -> Any:
    from open_instruct.data_types import PromptRequest, SamplingConfig

    prompt = np.arange(1, PROMPT + 1, dtype=np.int32)
    # a conversation's limit counts what the environment says too; `per_turn_max_tokens` bounds its turns
    most = arguments.turns * arguments.tokens + (0 if work == "single turns" else 64 * arguments.turns)
    config = SamplingConfig(max_tokens=most, n=GROUP, seed=number, ignore_eos=True)
    task = {
        "messages": [{"role": "user", "content": "12"}],
        "ground_truth": "",
        "environments": [{"env_name": "sleeper"}],
    }
    return PromptRequest(prompt, config, number, f"train-{number}", 0, task=None if work == "single turns" else task)


@contextmanager
def engine(
    arguments: argparse.Namespace, model: str, directory: Path, work: str
) -> Iterator[tuple[Any, LocalQueue, LocalQueue]]:
    """An engine actor that serves queues of this process."""
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.device import current_device
    from open_instruct.run.rollout_manager import engine_options
    from open_instruct.vllm_utils3 import LLMRayActor

    options: dict[str, Any] = {"vllm_max_num_seqs": arguments.conversations, "vllm_enforce_eager": True}
    longest = PROMPT + arguments.turns * (arguments.tokens + 64)
    if work == "conversations":
        options |= {
            "rollout_workflow": "conversation",
            "environment_modules": [str(directory / "sleeper.py")],
            "per_turn_max_tokens": arguments.tokens,
            "max_steps": arguments.turns,
        }
    args = GRPOConfig(model_name_or_path=model, **options)
    prompts, results = LocalQueue(), LocalQueue()
    queues: Any = (prompts, results)
    actor = LLMRayActor(0, engine_options(args, current_device(), seed=1, max_model_len=longest), *queues)
    thread = threading.Thread(target=actor.process_queue_continuously)
    thread.start()
    try:
        yield actor, prompts, results
    finally:
        actor.stop()
        thread.join(LIMIT_S)
        actor.shutdown()


if __name__ == "__main__":
    main()
