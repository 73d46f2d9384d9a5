"""The start of a run's parts, with fakes in place of the actors."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray.exceptions
from component_fakes import components_of
from conftest import make_args

from open_instruct.cluster.failures import ComponentDied
from open_instruct.run import components as components_module


@pytest.mark.parametrize(
    ("options", "learners_begin"),
    [
        ({}, "first"),
        ({"single_gpu_mode": True, "device_type": "cuda"}, "last"),
        ({"colocate": True, "async_steps": 0}, "last"),
    ],
)
def test_learners_that_share_a_gpu_start_after_the_engines(options: dict[str, Any], learners_begin: str) -> None:
    """vLLM measures the free memory of the whole GPU when it starts: a learner that loads meanwhile falsifies it."""
    events: list[str] = []

    def says(name: str) -> Any:
        return SimpleNamespace(remote=lambda: name)

    def start_learners(_args: Any, *, with_ref: bool) -> list[str]:
        events.append("learners begin")
        return ["learners"]

    engines = [SimpleNamespace(ready=says(f"engine {number}")) for number in range(2)]
    manager = SimpleNamespace(
        controller=SimpleNamespace(__ray_ready__=says("controller")),
        rollout_engines=engines,
        teachers=[SimpleNamespace(ready=says("teacher"))],
    )

    def wait(refs: Any, **_: Any) -> None:
        events.extend(f"{ref} ready" for ref in (refs if isinstance(refs, list) else [refs]))

    components = components_of(rollouts=manager, learners=SimpleNamespace(async_init=start_learners), wait=wait)
    components.wait_until_ready(make_args(**options))
    others = ["controller ready", "engine 0 ready", "engine 1 ready", "teacher ready"]
    expected = ["learners begin", *others] if learners_begin == "first" else [*others, "learners begin"]
    assert events == [*expected, "learners ready"]


def test_engine_that_dies_while_it_starts_may_start_again_before_learners_take_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `colocate` learners start after the engines, so nobody else has memory there yet."""
    for part in ("bundles", "NodeWatch", "EngineSupervisor", "ProcessWatch", "Health", "Waits"):
        monkeypatch.setattr(components_module, part, MagicMock())
    parts: Any = [MagicMock() for _ in range(5)]
    components = components_module.watched(make_args(colocate=True, async_steps=0), *parts)
    supervisor: Any = components_module.EngineSupervisor
    may_start = supervisor.call_args.kwargs["may_start"]
    assert may_start()
    components.sharing.offload_engines()
    assert not may_start()


@pytest.mark.parametrize("fails_during", ["the start of the controller", "the start of engine 0"])
def test_learners_that_die_while_engines_load_end_the_run(monkeypatch: pytest.MonkeyPatch, fails_during: str) -> None:
    """They were killed, for want of memory perhaps. It must not be taken for the death of the engine that is waited for."""

    def failed(_: Any, subject: str) -> None:
        raise ComponentDied(f"{subject} failed: killed") from ray.exceptions.ActorDiedError()

    def wait(_: Any, *, subject: str, on_poll: Any, **__: Any) -> None:
        waits.append(subject)
        if subject == fails_during:
            on_poll()

    waits: list[str] = []
    parts = SimpleNamespace(wait=lambda refs, **_: (refs, []), exceptions=ray.exceptions)
    monkeypatch.setattr(components_module, "ray", parts)
    monkeypatch.setattr(components_module, "value_of", failed)
    controller = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: "controller"))
    rollouts = SimpleNamespace(controller=controller, rollout_engines=[MagicMock()], teachers=[])
    learners = SimpleNamespace(async_init=lambda *_, **__: ["no memory"])
    components = components_of(rollouts=rollouts, learners=learners, wait=wait)
    with pytest.raises(ComponentDied, match="the start of the learners failed: killed"):
        components.wait_until_ready(make_args())
    assert waits[-1] == fails_during
