"""The driver's order of events, with fakes in place of the actors."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from conftest import make_args

from open_instruct.cluster.failures import ComponentDied
from open_instruct.run import coordinator
from open_instruct.run.coordinator import Parts, Signals


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
    manager = SimpleNamespace(controller=SimpleNamespace(__ray_ready__=says("controller")), rollout_engines=engines)
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


def test_a_part_that_died_while_nobody_waited_for_it_ends_the_run() -> None:
    """A learner while prompts are generated; an engine is replaced instead."""
    parts = parts_of(manager=SimpleNamespace(rollout_engines=["one", "two"]))
    dead: list[str] = []
    parts.processes = SimpleNamespace(stopped=list, dead=dead)  # pyrefly: ignore[bad-assignment]
    dead.append("engine 1")
    parts.check_health()
    dead.append("learner 0")
    with pytest.raises(ComponentDied, match=r"^learner 0 died: the process is gone$"):
        parts.check_health()
    parts.nodes = SimpleNamespace(lost=list, lost_now=lambda: ["the node 10.0.0.7 is gone"])  # pyrefly: ignore
    with pytest.raises(ComponentDied, match=r"^the node 10\.0\.0\.7 is gone$"):
        parts.check_health()
    parts.is_ending = True
    parts.check_health()


@pytest.mark.parametrize("through_another", [False, True])
def test_a_death_is_told_by_the_name_of_who_died(monkeypatch: pytest.MonkeyPatch, through_another: bool) -> None:
    died: Exception = ray.exceptions.ActorDiedError()
    died.actor_id = "b2"  # type: ignore[attr-defined]
    if through_another:
        died = ray.exceptions.RayTaskError("get", "a traceback", died)

    def fail(*_: object, **__: object) -> None:
        raise died

    monkeypatch.setattr(coordinator.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(coordinator.ray, "get", fail)
    parts = parts_of()
    actors = {
        name: SimpleNamespace(_actor_id=bytes.fromhex(id_)) for name, id_ in (("learner 0", "a1"), ("learner 1", "b2"))
    }
    monkeypatch.setattr(parts, "actors", lambda: actors)
    with pytest.raises(ComponentDied, match=r"^learner 1 died: saving a checkpoint failed: ActorDiedError: "):
        parts.wait("it", what="saving a checkpoint", timeout_s=1.0)


def test_ray_may_need_a_second_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its own processes 30 s, which a busy machine may need for something else."""
    attempts: list[dict[str, Any]] = []
    ended: list[str] = []

    def init(**options: Any) -> None:
        attempts.append(options)
        if len(attempts) == 1:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(coordinator.ray, "init", init)
    monkeypatch.setattr(coordinator.ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(coordinator, "kill_marked", ended.append)
    coordinator._enter_ray("mark", is_own=False)
    assert (len(attempts), ended) == (2, ["ray", "mark"])
    attempts.clear()
    monkeypatch.setattr(coordinator.ray, "init", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        coordinator._enter_ray("mark", is_own=False)
