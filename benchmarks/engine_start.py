"""How long an engine takes until it generates, and how fast it then is, with and without compiling the model.

    python benchmarks/engine_start.py                                 # three rounds of eager, compiled, compiled again
    python benchmarks/engine_start.py --model_name_or_path DIRECTORY --num_runs 1

Each engine is a process of its own, with the options of a run. *Compiled* begins without vLLM's cache of compiled models, as new
models do; *compiled again* finds what the engine before it has compiled. `ready_s` is from the start of the process to the first
token, `tokens_per_s` is of `--num_prompts` responses at once, after a first round that is left out. `ready_cpu_s` and
`tokens_per_cpu_s` count the processor's time, on which other work on the machine has little influence.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import print_table, write_json
from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig

ROOT = Path(__file__).resolve().parents[1]
PROMPT = list(range(3, 35))
KINDS = {"eager": True, "compiled": False, "compiled again": False}


def measure(args: argparse.Namespace, *, eager: bool, cache: str) -> dict[str, float]:
    """Start an engine in a process of its own and have it generate."""
    options = ["--model_name_or_path", args.model_name_or_path, "--vllm_enforce_eager", str(eager)]
    options += ["--async_steps", "0", "--response_length", str(args.response_length)]
    device_env = parse_args(options, GRPOConfig).device.actor_env
    environment = {**os.environ, **device_env, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CACHE_ROOT": cache}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    words = [sys.executable, __file__, "--engine", str(args.num_prompts), str(time.time()), *options]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, env=environment, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def run_engine(num_prompts: int, started: float, options: list[str]) -> dict[str, float]:
    from open_instruct.engines.vllm_engine import make_engine, sampling_params
    from open_instruct.run.rollout_manager import engine_options

    args = parse_args(options, GRPOConfig)
    length = len(PROMPT) + args.response_length
    engine = make_engine(engine_options(args, args.device, seed=1, max_model_len=length), 0)

    def generate(num: int, num_tokens: int) -> float:
        """Seconds for so many responses of so many tokens."""
        began = time.perf_counter()
        for number in range(num):
            config = type(args.train_sampling)(max_tokens=num_tokens, seed=number, ignore_eos=True)
            engine.add_request(f"{began}-{number}", {"prompt_token_ids": PROMPT}, sampling_params(config))
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - began

    generate(1, 1)
    ready_s, ready_cpu_s = time.time() - started, cpu_seconds()
    generate(num_prompts, args.response_length)
    before = cpu_seconds()
    seconds = generate(num_prompts, args.response_length)
    num_tokens = num_prompts * args.response_length
    return {
        "ready_s": ready_s,
        "ready_cpu_s": ready_cpu_s,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_cpu_s": num_tokens / (cpu_seconds() - before),
    }


def cpu_seconds() -> float:
    """Processor time of this process and of the processes that it has ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default=str(ROOT / "assets" / "tiny_model"))
    parser.add_argument("--num_runs", type=int, default=3)
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--response_length", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for number in range(args.num_runs):
        with tempfile.TemporaryDirectory() as cache:
            for kind, eager in KINDS.items():
                figures = measure(args, eager=eager, cache=cache)
                runs.append({"run": number, "kind": kind, **figures})
                print_table([runs[-1]])
    write_json(args.json, runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        print(json.dumps(run_engine(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])))
    else:
        main()
