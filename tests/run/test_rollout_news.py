"""The last news of the rollout side, when a run ends; with real waits and a real `Health`, and fakes in place of the actors."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from component_fakes import components_of
from driver_fakes import PlayedController, Remote, batch_progress

from open_instruct.cluster.failures import ComponentDied
from open_instruct.rollouts.batch_progress import RolloutNews
from open_instruct.run import ray_results, rollout_news, waits
from open_instruct.run.rollout_news import tell_last_news


class Silence:
    """A call that is never answered."""


def run_with(monkeypatch: pytest.MonkeyPatch, controller: Any, **parts: Any) -> Any:
    """A run whose evaluation of version 3 is under way. What a call returns is its own reference."""

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if not isinstance(ref, Silence)]
        waiting = [ref for ref in refs if isinstance(ref, Silence)]
        time.sleep(0.01)
        return done, waiting

    def get(ref: Any, **_: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(waits.ray, "wait", wait)
    monkeypatch.setattr(ray_results.ray, "get", get)
    rollouts = SimpleNamespace(rollout_engines=[], controller=controller, async_eval=lambda _: "complete")
    log = SimpleNamespace(prompts=lambda *_: None, waiting=lambda _: None, evaluation=lambda *_: None)
    components = components_of(rollouts=rollouts, **parts)
    return SimpleNamespace(components=components, log=log, evaluation_of=3, progress=SimpleNamespace())


def controller(news: RolloutNews, **methods: Any) -> Any:
    played = PlayedController()
    played.news = lambda: news  # type: ignore[method-assign]
    for name, method in methods.items():
        setattr(played, name, method)
    return Remote(played)


def news_of(*warnings: str, is_complete: bool = False) -> Any:
    """News that can be a key, as a reference is."""

    class News(RolloutNews):
        __hash__ = object.__hash__

    return News(list(warnings), is_complete, {}, batch_progress())


def no_health() -> Any:
    raise ComponentDied("node 10.0.0.7 is gone")


@pytest.mark.parametrize("dead", ["a learner", "a queue", "a node"])
def test_news_are_told_though_another_part_is_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dead: str
) -> None:
    parts: dict[str, Any] = {}
    if dead == "a learner":
        parts["processes"] = SimpleNamespace(stopped=list, dead=["learner 0"])
    if dead == "a node":
        parts["nodes"] = SimpleNamespace(lost=no_health, lost_now=lambda: ["node 10.0.0.7 is gone"])
    run = run_with(monkeypatch, controller(news_of("no score above 0")), **parts)
    if dead == "a queue":
        run.components.health.heartbeats = SimpleNamespace(check=no_health, name_the_dead=lambda: None)
    with pytest.raises(ComponentDied):
        run.components.health.check()
    tell_last_news(run)
    assert caplog.messages == ["no score above 0"]


def test_a_dead_controller_has_no_news_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    died: Any = ComponentDied("the controller died")
    tell_last_news(run_with(monkeypatch, controller(died)))
    assert caplog.messages == ["the last news of the rollout side is not told: ComponentDied: the controller died"]


def test_the_last_news_and_an_evaluation_have_one_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After SIGTERM a scheduler kills the run soon, and its checkpoint is written only after this."""
    caplog.set_level("INFO")
    monkeypatch.setattr(rollout_news, "LAST_S", 0.1)
    began = time.monotonic()
    tell_last_news(run_with(monkeypatch, controller(news_of(is_complete=True), take_evaluation=Silence)))
    assert time.monotonic() - began < 10.0
    (line,) = caplog.messages
    assert "is not told: TimeoutError: the evaluation's metrics: 1 of 1 did not answer in 0" in line
