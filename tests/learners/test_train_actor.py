"""The abstract training actor promises all that is asked of one."""

import ast
import inspect
from pathlib import Path

from benchmarks.fake_parts import FakeLearner
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.learners.learner import PolicyTrainerRayProcess
from open_instruct.learners.train_actor import TrainRayActor

PACKAGE = Path(__file__).parents[2] / "open_instruct"


def asked_by_the_group() -> set[str]:
    """Names that `RayTrainGroup` calls on its workers: `self._all("train", …)`, `self.workers[0].open_rendezvous.remote(…)`."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(RayTrainGroup))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._all":
            names.add(ast.literal_eval(node.args[0]))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.workers[0]":
            names.add(node.attr)
    return names


def test_whatever_the_group_asks_is_promised_by_the_abstract_actor() -> None:
    asked = asked_by_the_group()
    assert {"train", "held_version", "open_rendezvous", "load_checkpoint"} <= asked
    assert asked <= TrainRayActor.__abstractmethods__


def test_an_actor_that_keeps_the_promise_has_the_same_parameters() -> None:
    for kind in (PolicyTrainerRayProcess, FakeLearner):
        assert not inspect.isabstract(kind)
        for name in TrainRayActor.__abstractmethods__:
            promised = inspect.signature(getattr(TrainRayActor, name)).parameters
            kept = dict(inspect.signature(getattr(kind, name)).parameters)
            kept.pop("_ray_trace_ctx", None)  # Ray adds it once it has made an actor of the class
            assert [(one.lstrip("_"), p.kind) for one, p in kept.items()] == [(n, p.kind) for n, p in promised.items()]
