# ruff: noqa: F811 - fixtures are imported
"""The controller goes on from a saved state with other options, as `docs/guides/preemption.md` says."""

import queue
import time
from pathlib import Path
from typing import Any

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    MIXED,
    NUM_PROMPTS,
    NUM_STEPS,
    TIMEOUT_S,
    MakePlay,
    Play,
    datasets,
    make_play,
    tokenizer,
)

from open_instruct.data_types import PromptRequest
from open_instruct.rollouts.prompt_requests import PromptRequests

ALIKE = (0, 0, 0, 0)


def scores_of(request: PromptRequest) -> Any:
    """Every third prompt is one whose responses all score alike."""
    return ALIKE if int(request.prompt_id.removeprefix("train-")) % 3 == 2 else MIXED


def answer_what_comes(play: Play, wait_s: float) -> bool:
    try:
        requests = play.prompt_queue.get(timeout=wait_s)
    except queue.Empty:
        return False
    play.received += requests
    play.deliver(*(play.answer(request, scores_of(request)) for request in requests))
    return True


def train(play: Play, first_step: int, last_step: int) -> dict[str, int]:
    """Training steps with every prompt answered as it comes. Returns the age at which each prompt was trained."""
    ages: dict[str, int] = {}
    for training_step in range(first_step, last_step + 1):
        deadline = time.monotonic() + TIMEOUT_S
        while play.message_queue.partial_batches.empty():
            assert time.monotonic() < deadline, play.controller.describe_progress()
            answer_what_comes(play, 0.01)
        batches = play.partial_batches(training_step)
        age = training_step - 1 - min(batch.min_version for batch in batches)
        for prompt_id in {prompt_id for batch in batches for prompt_id, _ in play.prompts_in(batch)}:
            assert prompt_id not in ages, f"{prompt_id} is trained twice"
            ages[prompt_id] = age
        play.finish_step(training_step)
    return ages


PACING = [
    ({"async_steps": 2}, {"async_steps": 0}),
    ({"async_steps": 2}, {"async_steps": 1}),
    ({"async_steps": 0}, {"async_steps": 2}),
    ({"async_steps": 2}, {"async_steps": 1, "max_staleness_allowed": 2}),
    ({"async_steps": 1, "over_issued_prompts": 2, "max_staleness_allowed": 2}, {"async_steps": 1}),
    ({"async_steps": 1}, {"async_steps": 1, "over_issued_prompts": 2, "max_staleness_allowed": 2}),
    (
        {"async_steps": 1, "over_issued_prompts": 2, "max_staleness_allowed": 2},
        {"async_steps": 0, "straggler_policy": "drop"},
    ),
    ({"async_steps": 2}, {"async_steps": 0, "straggler_policy": "truncate"}),
    ({"async_steps": 1, "active_sampling": True}, {"async_steps": 1}),
    ({"async_steps": 1}, {"async_steps": 1, "active_sampling": True}),
    ({"async_steps": 2, "active_sampling": True}, {"async_steps": 0, "filter_zero_std_samples": False}),
    ({"async_steps": 1}, {"async_steps": 1, "streaming": True, "min_batch_count": 2}),
]


@pytest.mark.parametrize(("before", "after"), PACING, ids=str)
def test_pacing_and_filters_may_change_at_a_resume(
    make_play: MakePlay, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The new bound holds at once, no prompt is trained twice, none is lost, and the run ends."""
    stopped = make_play(**before).start()
    first = train(stopped, 1, 1)
    while answer_what_comes(stopped, 0.3):  # finished groups of steps ahead are in the checkpoint
        pass
    stopped.controller.save(1, str(tmp_path / "state.npz"))
    stopped.controller.stop()

    resumed = make_play(**after)
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.start(1)
    later = train(resumed, 2, NUM_STEPS)
    assert max(later.values()) <= resumed.args.staleness_bound
    assert not first.keys() & later.keys()
    counts: Any = resumed.controller.close_ledger()
    assert counts["issued"] == counts["consumed"] + sum(counts["dropped"].values())
    assert counts["consumed"] == len(first) + len(later)
    if resumed.args.active_sampling:
        assert len(later) == NUM_PROMPTS * (NUM_STEPS - 1)


def test_groups_of_the_checkpoint_have_the_rewards_of_the_new_options(make_play: MakePlay, tmp_path: Path) -> None:
    options = {"async_steps": 1, "filter_zero_std_samples": False}
    stopped = make_play(**options, verification_reward=10.0).start()
    stopped.run(1, 1)
    stopped.batch(2)
    stopped.controller.save(1, str(tmp_path / "state.npz"))
    scores = []
    for reward in (10.0, 1.0):
        resumed = make_play(**options, verification_reward=reward)
        resumed.controller.load(1, str(tmp_path / "state.npz"))
        resumed.start(1)
        scores.append(resumed.batch(2).metrics["scores"])
        resumed.controller.stop()
    assert scores == [10 * scores[1], pytest.approx(sum(MIXED) / len(MIXED))]


def test_solved_rows_come_back_without_the_option_that_left_them_out(make_play: MakePlay) -> None:
    for rate, is_skipped in ((0.5, True), (None, False)):
        requests: PromptRequests = make_play(no_resampling_pass_rate=rate).controller._requests
        requests.solved_rows = {requests.row_number(3)}
        assert requests.is_skipped(3) == is_skipped
