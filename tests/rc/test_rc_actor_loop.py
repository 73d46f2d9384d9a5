"""The loop of the actor and the results of its workers."""

from typing import Any

import pytest
from rc_fakes import problem, settings

from open_instruct import rc_actor
from open_instruct.engines.openai_client import ServedModel
from open_instruct.rc.actor_loop import Phase, RCActorLoop, RunFailed
from open_instruct.rc.options import read_options
from open_instruct.rc.scheduler import NOT_SCORED, PROMPT_TOO_LONG
from open_instruct.rc.statistics import RolloutStatistics
from open_instruct.workflows.rc.types import RolloutResult


def make_loop(*words: str) -> RCActorLoop:
    """Without workers."""
    options = read_options(rc_actor.yaml_door.compose(rc_actor.YAML_PROGRAM, list(words)))
    phase = Phase("actor", [problem()], settings(), num_samples=1, attempts=1)
    nowhere: Any = None
    loop = RCActorLoop(phase, options, ServedModel("tiny", 4096), nowhere, RolloutStatistics(), set())
    loop._note_start()
    return loop


def test_verifiers_that_score_nothing_end_the_run() -> None:
    """As one that cannot be loaded."""
    loop = make_loop("actor.max_consecutive_failures=3")
    result = RolloutResult("a", [], dropped=NOT_SCORED, cause="NotScored: code: unavailable")
    for one in (result, RolloutResult("b", [], dropped=PROMPT_TOO_LONG), result):
        loop._publish(one)
    with pytest.raises(RunFailed, match=r"3 trajectories in a row failed .* because of: NotScored: code: unavailable"):
        loop._publish(result)
