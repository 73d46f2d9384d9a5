"""What the driver notices of parts that died, with fakes in place of the actors."""

from types import SimpleNamespace

import pytest
from component_fakes import components_of

from open_instruct.cluster.failures import ComponentDied


def test_a_part_that_died_while_nobody_waited_for_it_ends_the_run() -> None:
    """A learner while prompts are generated; an engine is replaced instead."""
    dead = ["engine 1"]
    parts = {
        "rollouts": SimpleNamespace(rollout_engines=["one", "two"]),
        "processes": SimpleNamespace(stopped=list, dead=dead),
    }
    health = components_of(**parts).health
    health.check()
    dead.append("learner 0")
    with pytest.raises(ComponentDied, match=r"^learner 0 died: the process is gone$"):
        health.check()
    nodes = SimpleNamespace(lost=list, lost_now=lambda: ["the node 10.0.0.7 is gone"])
    health = components_of(**parts, nodes=nodes).health
    with pytest.raises(ComponentDied, match=r"^the node 10\.0\.0\.7 is gone$"):
        health.check()
    health.is_ending = True
    health.check()
