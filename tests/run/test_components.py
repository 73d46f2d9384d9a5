"""The start of a run's parts, with fakes in place of the actors."""

from types import SimpleNamespace
from typing import Any

import pytest
from component_fakes import components_of
from conftest import make_args


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

    components = components_of(manager=manager, group=SimpleNamespace(async_init=start_learners), wait=wait)
    components.wait_until_ready(make_args(**options))
    others = ["controller ready", "engine 0 ready", "engine 1 ready", "teacher ready"]
    expected = ["learners begin", *others] if learners_begin == "first" else [*others, "learners begin"]
    assert events == [*expected, "learners ready"]
