"""How much faster learners on CPU compute products of matrices in float32 with oneDNN than torch does (`learners/cpu_linear.py`).

    python benchmarks/cpu_products.py

For a linear layer of a small model and for the head of a large vocabulary: the forward pass, and the backward pass by inputs and
by weights. Milliseconds with a thread per core, in turns; each figure is the median of `--rounds`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import print_table, write_json
from open_instruct.learners.cpu_linear import pays_off, product

SIZES = {"linear layer": (1_800, 256, 768), "head": (110, 896, 151_936)}
"""Tokens, inputs and outputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    if not pays_off(torch.float32):
        parser.error("learners use oneDNN on processors with AVX-512 alone, and this is none")
    rows = [row for name, sizes in SIZES.items() for row in rows_of(name, *sizes, num_rounds=args.rounds)]
    print_table(rows)
    write_json(args.json, rows)


def rows_of(name: str, num_tokens: int, num_inputs: int, num_outputs: int, *, num_rounds: int) -> list[dict[str, Any]]:
    input_NI, weight_OI = torch.randn(num_tokens, num_inputs), torch.randn(num_outputs, num_inputs)
    grad_NO = torch.randn(num_tokens, num_outputs)
    pairs = {
        "forward": (lambda: input_NI @ weight_OI.T, lambda: product(input_NI, weight_OI)),
        "backward, inputs": (lambda: grad_NO @ weight_OI, lambda: product(grad_NO, weight_OI.T)),
        "backward, weights": (lambda: grad_NO.T @ input_NI, lambda: product(grad_NO.T, input_NI.T)),
    }
    rows = []
    for what, (of_torch, of_onednn) in pairs.items():
        torch.testing.assert_close(of_onednn(), of_torch(), rtol=1e-3, atol=1e-2)
        in_turns = [(milliseconds(of_torch), milliseconds(of_onednn)) for _ in range(num_rounds)]
        torch_ms, onednn_ms = (median(column) for column in zip(*in_turns, strict=True))
        rows.append(
            {"product": f"{name}: {what}", "torch_ms": torch_ms, "onednn_ms": onednn_ms, "times": torch_ms / onednn_ms}
        )
    return rows


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()
