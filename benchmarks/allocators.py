"""Memory and CPU time of a learner on CPU with glibc's allocator and with jemalloc (`device.allocator_env`).

    python benchmarks/allocators.py     # about 6 minutes on two cores

Each run is a process of its own, which computes the gradients of micro-batches of random lengths with a random model of 23 M
parameters. Held is the most memory of its own (RssAnon) that the process had, less what it had before the first micro-batch;
needed is the most that its gradients and the tensors that one forward pass keeps take. Runs take turns; each figure is the
median, with the lowest and the highest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.memory import SIZES, build_model, own_bytes  # noqa: E402
from benchmarks.report import print_table, write_json  # noqa: E402

NUM_ROWS = 8
LENGTHS = 180, 330
"""Tokens of the rows of a micro-batch: from, to."""
LIMIT_S = 600.0
"""Deadline of one run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=40)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    if args.model:
        print(json.dumps(train(args.model, args.micro_batches)))
        return
    from open_instruct.device import allocator_env, current_device

    ways = {"glibc": {}, "jemalloc": allocator_env(current_device(kind="cpu"))}
    if not ways["jemalloc"]:
        parser.error("learners use jemalloc on x86-64 where LD_PRELOAD is not set")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as model:
        build_model(Path(model), *SIZES["23 M"])
        for _ in range(args.rounds):
            for way, env in ways.items():
                found[way].append(in_process_of_its_own(model, args.micro_batches, env))
    table = [{"allocator": way} | columns(runs) for way, runs in found.items()]
    print_table(table)
    write_json(args.json, table)


def in_process_of_its_own(model: str, num_micro_batches: int, env: dict[str, str]) -> dict[str, float]:
    words = [sys.executable, __file__, "--model", model, "--micro-batches", str(num_micro_batches)]
    ran = subprocess.run(words, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    return json.loads(ran.stdout.splitlines()[-1])


def columns(runs: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"needed_mib": runs[0]["needed_mib"]}
    for name in ("held_mib", "cpu_s"):
        values = [run[name] for run in runs]
        row |= {name: median(values), f"{name}_lowest": min(values), f"{name}_highest": max(values)}
    return row


def train(path: str, num_micro_batches: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from open_instruct.learners.cpu_linear import use_onednn
    from open_instruct.learners.logprobs import LogProbModel

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    use_onednn(model)
    learner = LogProbModel(model, chunk_elements=2**24)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    generator = torch.Generator().manual_seed(0)
    before, most, needed, started = own_bytes(os.getpid()), 0, 0, time.process_time()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(num_micro_batches):
        kept.clear()
        length = int(torch.randint(*LENGTHS, (1,), generator=generator))
        ids = torch.randint(0, 8000, (NUM_ROWS, length), generator=generator)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _, _ = learner(ids, torch.arange(length).expand(NUM_ROWS, length), 1.0)
        needed = max(needed, sum(size for place, size in kept.items() if place not in parameters))
        most = max(most, own_bytes(os.getpid()))
        logprobs.sum().backward()
        most = max(most, own_bytes(os.getpid()))
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "held_mib": (most - before) / 2**20,
        "needed_mib": (needed + gradients) / 2**20,
        "cpu_s": time.process_time() - started,
    }


if __name__ == "__main__":
    main()
