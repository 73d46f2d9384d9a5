"""What `--dry_run` says about memory, against what a learner and an engine of a real run take."""

import pytest

from benchmarks import memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [[], ["--use_peft"]], ids=["all weights", "adapters"])
def test_said_is_taken_within_15_percent(options: list[str]) -> None:
    row = memory.row("23 M", options)
    assert 0.85 < row["learner_said/taken"] < 1.15, row
    assert 0.85 < row["engine_said/taken"] < 1.15, row
