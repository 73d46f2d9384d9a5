"""What an engine saves by computing a prompt once for all its responses: seconds and CPU-seconds for the responses of a step.

    python benchmarks/shared_prompts.py                                                   # the tiny model
    python benchmarks/shared_prompts.py --model out/SmolLM2-135M-Instruct --rounds 5

One real engine on CPU samples 8 prompts × 8 responses of forced length. *shared*: as a run does (`--vllm_enable_prefix_caching`
is on by default). *alone*: each response in a part of the cache of its own, so that its prompt is computed for it alone.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import SamplingConfig
from open_instruct.engines.vllm_engine import VLLMEngine, make_engine, sampling_params
from open_instruct.run.rollout_manager import engine_options

ROOT = Path(__file__).resolve().parents[1]
NUM_PROMPTS, GROUP_SIZE = 8, 8


def one_batch(engine: VLLMEngine, prompts: list[list[int]], num_tokens: int, name: str, *, is_shared: bool) -> None:
    """Sample all responses. `name` is new for each batch, so that nothing of earlier batches is reused."""
    for number, prompt in enumerate(prompts):
        for part in range(1 if is_shared else GROUP_SIZE):
            config = SamplingConfig(n=GROUP_SIZE if is_shared else 1, max_tokens=num_tokens, ignore_eos=True)
            request: dict[str, Any] = {"prompt_token_ids": prompt, "cache_salt": f"{name}-{number}-{part}"}
            engine.add_request(f"{name}-{number}-{part}", request, sampling_params(config))
    while engine.has_unfinished_requests():
        engine.step()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    options = GRPOConfig(model_name_or_path=args.model)
    max_model_len = args.prompt_tokens + args.response_tokens
    engine = VLLMEngine(
        make_engine(engine_options(options, options.device, seed=1, max_model_len=max_model_len), 0), timeout_s=60.0
    )
    draw = np.random.default_rng(1)
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(args.rounds + 1):  # the first is warm-up
        for is_shared in (True, False) if number % 2 else (False, True):
            prompts = draw.integers(5, 300, (NUM_PROMPTS, args.prompt_tokens)).tolist()
            wall, cpu = time.perf_counter(), time.process_time()
            one_batch(engine, prompts, args.response_tokens, f"{number}-{is_shared}", is_shared=is_shared)
            if number:
                seconds[is_shared].append((time.perf_counter() - wall, time.process_time() - cpu))
    engine.shutdown()
    return [row("shared", seconds[True]), row("alone", seconds[False])]


def row(way: str, measured: list[tuple[float, float]]) -> dict[str, Any]:
    walls, cpu = zip(*measured, strict=True)
    return {"way": way, "s": median(walls), "lowest": min(walls), "highest": max(walls), "cpu_s": median(cpu)}


def main() -> None:
    from benchmarks.report import print_table, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets/tiny_model"))
    parser.add_argument("--prompt_tokens", type=int, default=46)
    parser.add_argument("--response_tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = measure(args)
    print_table(table)
    write_json(args.json, table)
    print(json.dumps({"times_faster": round(table[1]["s"] / table[0]["s"], 2)}))


if __name__ == "__main__":
    main()
