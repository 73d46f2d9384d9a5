"""The driver's waits, with fakes in place of the actors."""

import signal
from types import SimpleNamespace

import pytest
import ray.exceptions
from component_fakes import components_of

from open_instruct.cluster.failures import ComponentDied
from open_instruct.engines.vllm_engine import EngineCoreLost
from open_instruct.run import ray_results, waits


def test_a_wait_that_was_too_short_names_the_option_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits.ray, "wait", lambda refs, **_: ([], refs))
    with pytest.raises(
        TimeoutError, match=r"^the start of engine 0: 1 of 1 did not answer in 0 s\. .* --init_timeout_s$"
    ):
        components_of().wait("never", subject="the start of engine 0", timeout_s=0.0, limit="init_timeout_s")


@pytest.mark.parametrize("through_another", [False, True])
def test_a_death_is_told_by_the_name_of_who_died(monkeypatch: pytest.MonkeyPatch, through_another: bool) -> None:
    died: Exception = ray.exceptions.ActorDiedError()
    died.actor_id = "b2"  # type: ignore[attr-defined]
    if through_another:
        died = ray.exceptions.RayTaskError("get", "a traceback", died)

    def fail(*_: object, **__: object) -> None:
        raise died

    monkeypatch.setattr(waits.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_results.ray, "get", fail)
    components = components_of()
    actors = {
        name: SimpleNamespace(_actor_id=bytes.fromhex(id_)) for name, id_ in (("learner 0", "a1"), ("learner 1", "b2"))
    }
    monkeypatch.setattr(components.health, "actors", lambda: actors)
    with pytest.raises(ComponentDied, match=r"^learner 1 died: saving a checkpoint failed: ActorDiedError: "):
        components.wait("it", subject="saving a checkpoint", timeout_s=1.0)


def test_after_a_signal_no_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while something is finished first, such as the learners' step: the run ends without the engine."""
    monkeypatch.setattr(waits.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_results.ray, "get", lambda *_, **__: "done")
    replaced: list[str] = []
    components = components_of(
        supervisor=SimpleNamespace(check=lambda: replaced.append("an engine"), began=lambda _: None)
    )
    assert components.wait("the step", subject="step 3", timeout_s=1.0) == "done"
    assert replaced == ["an engine"]
    components.signals.received = signal.SIGTERM
    assert components.wait("the step", subject="step 3", timeout_s=1.0) == "done"
    assert replaced == ["an engine"]


@pytest.mark.parametrize(
    "died",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.RayTaskError("wake_up", "a traceback", EngineCoreLost("it died")).as_instanceof_cause(),
    ],
)
def test_devices_are_handed_over_without_an_engine_whose_actor_or_core_died(
    monkeypatch: pytest.MonkeyPatch, died: Exception
) -> None:
    """The supervisor replaces it. On GPU the core is a process of its own, which the kernel may kill alone."""

    def get(ref: str, **_: object) -> int:
        if ref == "dead":
            raise died
        return 10

    monkeypatch.setattr(waits.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_results.ray, "get", get)
    components = components_of()
    refs = ["dead", "alive"]
    assert components.wait(refs, subject="engines: onload", timeout_s=1.0, without_dead=True) == [None, 10]
    with pytest.raises(ComponentDied):
        components.wait(refs, subject="engines: onload", timeout_s=1.0)
