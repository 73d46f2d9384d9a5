"""The benchmark of the queues: what it writes, and that the message queue is worth having."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.queue_throughput import OPERATIONS, SAMPLE_BYTES, ratios

ROOT = Path(__file__).parents[2]


def test_the_documents_sample() -> None:
    assert SAMPLE_BYTES == 114_688


@pytest.mark.slow
def test_the_message_queue_is_faster_than_the_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--num_rounds", "3", "--producers", "4", "--json", str(file)]
    subprocess.run([sys.executable, "benchmarks/queue_throughput.py", *options], cwd=ROOT, check=True, timeout=500)
    report = json.loads(file.read_text())
    assert {"commit", "cores", "versions"} <= report["header"].keys()
    assert {(row["queue"], row["operation"], row["producers"]) for row in report["rows"]} == {
        (queue, operation, 4)
        for queue in ("plain", "plain_batches", "message_queue", "transfer_queue")
        for operation in OPERATIONS
    }
    for row in report["rows"]:
        assert row["mb_per_s"] == pytest.approx(row["samples_per_s"] * SAMPLE_BYTES / 1e6)
    times = ratios(report["rows"], 4)
    assert times["message_queue / plain, put+get"] >= 5
    assert times["message_queue / plain_batches, put+get"] >= 1.5
    assert times["message_queue / transfer_queue, put+get"] >= 2
