"""What reasoning-cache rollouts cost beside the sampling itself: the actor against a replay of its own requests.

    python benchmarks/rc_overhead.py
    python benchmarks/rc_overhead.py --num_rounds 3 --num_problems 200 --json out/rc_overhead.json

One vLLM server on this machine, and two things in turns: the actor (worker process, tokenizing, scoring, writing) on
`--num_problems` problems and three cycles; and the replay: the recorded prompts, with the recorded lengths forced (`ignore_eos`),
through the same server with as many requests at once, from a bare client that does nothing with the replies. The replay knows all
prompts beforehand, where the actor waits for one turn to make the next.

A machine that others use changes its speed by a fifth within seconds: every run of the actor stands between two replays, and is
divided by the mean of both. Seeds are the same in all rounds, so that all do the same work. Seconds run from the first request to
the last reply; start-up is not part of them. Prefix caching is off: the replay would find its prompts there.

The tiny model ends most turns after about ten tokens, so that what is measured is mostly HTTP. `--untrained 64` serves one of the
same size with random weights instead, which goes on until the limit given, for both kinds of turns, as reasoning does.
"""

import argparse
import asyncio
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import print_table, write_json
from open_instruct import rc_actor
from open_instruct.config import yaml_files as yaml_door
from open_instruct.device import current_device
from open_instruct.engines.openai_client import ServedModel
from open_instruct.engines.server_keys import VLLM_KEY_VARIABLE, key_headers
from open_instruct.engines.vllm_server import ServerOptions, VllmServer
from open_instruct.rc.options import RCOptions, read_options
from open_instruct.rc.stream import read_stream
from open_instruct.workflows.rc.types import TrainingText

ROOT = Path(__file__).parents[1]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&seed=7"
PORT = 8093
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--num_problems", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max_tokens", type=int, default=128, help="most tokens of a reasoning turn")
    parser.add_argument("--untrained", type=int, metavar="TOKENS", help="a model that always uses up this limit")
    parser.add_argument("--json", help="write the rows there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through the `with` block of the server
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(arguments, directory)
    print_table(rows)
    print(f"\nthe actor takes {statistics.median(row['ratio'] for row in rows):.3f} times the replay (median)")
    write_json(arguments.json, rows)


def measure(arguments: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """`rounds` against a server that is started for them."""
    model = str(ROOT / "assets" / "tiny_model")
    if arguments.untrained:
        model = make_untrained(model, f"{directory}/model")
    os.environ.setdefault(VLLM_KEY_VARIABLE, secrets.token_hex(16))  # server, actor and replay read it there
    further = ("--no-enable-prefix-caching", "--disable-uvicorn-access-log")
    server = ServerOptions(model, PORT, current_device(), max_num_seqs=arguments.concurrency, extra=further)
    with VllmServer(server, Path(directory) / "server.log") as running:
        running.wait_until_ready(START_TIMEOUT_S)
        return rounds(arguments, model, running, directory)


def rounds(arguments: argparse.Namespace, model_path: str, server: VllmServer, directory: str) -> list[dict[str, Any]]:
    """A row for each round, after a run of the actor that warms up."""
    rows: list[dict[str, Any]] = []
    before_s = 0.0
    for number in range(arguments.num_rounds + 1):
        options = make_options(arguments, model_path, server.url, f"{directory}/{number}")
        model = rc_actor.find_servers(options)
        (phase,) = rc_actor.phases(options, rc_actor.load_problems(options))
        summary = rc_actor.run_phase(phase, options, model)
        turns = list(read_stream(Path(options.run.output_dir) / "streams" / "actor.jsonl"))
        after_s = asyncio.run(replay(turns, model, options, server.url))
        if number > 0:
            actor_s, replay_s = summary["wall_seconds"], (before_s + after_s) / 2
            row = {"round": number, "turns": len(turns), "tokens": summary["tokens"]}
            rows.append(row | {"actor_s": actor_s, "replay_s": replay_s, "ratio": actor_s / replay_s})
        before_s = after_s
    return rows


def make_untrained(like: str, path: str) -> str:
    """A model with the architecture and tokenizer of another, and random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like), dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(like).save_pretrained(path)
    return path


def make_options(arguments: argparse.Namespace, model: str, url: str, output_dir: str) -> RCOptions:
    words = [
        "--config-name=test_rc",
        f"output_dir={output_dir}",
        f"model_path={model}",
        f"me.llm_urls={url}",
        f"train_dataset_names=['{SUMS}&size={arguments.num_problems}']",
        f"actor.llm_max_rollouts={arguments.concurrency}",
        f"llm.parameters.max_tokens={arguments.untrained or arguments.max_tokens}",
        *([f"actor.max_summary_tokens={arguments.untrained}"] if arguments.untrained else []),
    ]
    return read_options(yaml_door.compose(rc_actor.YAML_PROGRAM, words))


async def replay(turns: list[TrainingText], model: ServedModel, options: RCOptions, url: str) -> float:
    """Seconds for the same prompts and lengths, `llm_max_rollouts` at a time."""
    room = asyncio.Semaphore(options.actor.llm_max_rollouts)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=key_headers(url, ())) as session:

        async def ask(number: int, turn: TrainingText) -> None:
            body = {
                "model": model.name,
                "prompt": turn.prompt_ids.tolist(),
                "max_tokens": max(1, len(turn.response_ids)),
                "ignore_eos": True,
                "temperature": options.llm.temperature,
                "top_p": options.llm.top_p,
                "seed": number,
                "logprobs": 0,
                "return_token_ids": True,
            }
            async with room, session.post(f"{url}/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

        started = time.perf_counter()
        await asyncio.gather(*(ask(number, turn) for number, turn in enumerate(turns)))
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
