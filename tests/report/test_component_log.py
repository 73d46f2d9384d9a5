"""Lines of the log in the formats that the fully async policy documents."""

from open_instruct.report.component_log import RolloutMilestones


def rollouter(generated: int, dropped: int = 0) -> dict[str, int]:
    return {
        "total_generated_samples": generated,
        "dropped_stale_samples": dropped,
        "current_param_version": 7,
        "generation_errors": 2,
    }


def test_every_tenth_batch_and_every_fifth_stale_sample_is_told_once() -> None:
    milestones = RolloutMilestones(batch_size=16)
    assert milestones.lines(rollouter(16 * 9 + 15, dropped=4)) == []
    assert milestones.lines(rollouter(16 * 10, dropped=4)) == ["Generated 10 batches, param_version=7, errors=2"]
    assert milestones.lines(rollouter(16 * 19, dropped=5)) == ["Dropped stale samples: 5"]
    assert milestones.lines(rollouter(16 * 19, dropped=9)) == []
    assert milestones.lines(rollouter(16 * 43, dropped=21)) == [
        "Generated 43 batches, param_version=7, errors=2",
        "Dropped stale samples: 21",
    ]
