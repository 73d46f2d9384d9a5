"""The driver's order of events, with fakes in place of the actors."""

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct import coordinator
from open_instruct.coordinator import Parts, Signals


def parts_of(**fakes: Any) -> Parts:
    nothing: Any = None
    return Parts(
        manager=fakes.get("manager", SimpleNamespace(rollout_engines=[])),
        group=fakes.get("group", nothing),
        message_queue=nothing,
        supervisor=fakes.get("supervisor", SimpleNamespace(check=lambda: None, began=lambda _: None)),
        signals=Signals(),
    )


@pytest.mark.parametrize(
    ("options", "learners_begin"),
    [({}, "first"), ({"single_gpu_mode": True}, "last"), ({"colocate": True, "async_steps": 0}, "last")],
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
    manager = SimpleNamespace(controller=SimpleNamespace(ready=says("controller")), rollout_engines=engines)
    parts = parts_of(manager=manager, group=SimpleNamespace(async_init=start_learners))
    parts.wait = lambda refs, **_: events.extend(  # pyrefly: ignore[bad-assignment]
        f"{ref} ready" for ref in (refs if isinstance(refs, list) else [refs])
    )
    parts.wait_until_ready(make_args(**options))
    others = ["controller ready", "engine 0 ready", "engine 1 ready"]
    expected = ["learners begin", *others] if learners_begin == "first" else [*others, "learners begin"]
    assert events == [*expected, "learners ready"]


def test_a_wait_that_was_too_short_names_the_option_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.ray, "wait", lambda refs, **_: ([], refs))
    with pytest.raises(
        TimeoutError, match=r"^the start of engine 0: 1 of 1 did not answer in 0 s\. .* --init_timeout_s$"
    ):
        parts_of().wait("never", what="the start of engine 0", timeout_s=0.0, limit="init_timeout_s")
