"""A writer that is killed at any moment leaves a record that opens."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "fakes" / "killed_writers.py"
NUM_KILLS = 25


def test_a_writer_that_is_killed_leaves_a_record_that_opens(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), str(tmp_path / "output"), str(NUM_KILLS), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= NUM_KILLS  # each has written at least a step
