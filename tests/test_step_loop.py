"""The driver's step loop with parts that are played: no Ray, no engine, no learner."""

from types import SimpleNamespace
from typing import Any

from open_instruct import grpo_fast


class Remote:
    """Methods of an actor: each call of `.remote` is noted."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], answers: dict[str, Any] | None = None) -> None:
        self._name, self._calls, self._answers = name, calls, answers or {}

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self._calls.append((self._name, method, *args))
            return self._answers.get(method)

        return SimpleNamespace(remote=remote)


def test_the_controller_hears_of_weights_that_engines_got_between_two_syncs() -> None:
    calls: list[tuple[Any, ...]] = []
    given: list[int | None] = [None, 5]
    run: Any = SimpleNamespace(
        synchronizer=SimpleNamespace(give_weights_to_newcomers=lambda: given.pop(0)),
        parts=SimpleNamespace(
            manager=SimpleNamespace(controller=Remote("controller", calls)), wait=lambda refs, **_: refs
        ),
    )
    grpo_fast.give_weights_to_newcomers(run)
    assert calls == []
    grpo_fast.give_weights_to_newcomers(run)
    assert calls == [("controller", "set_version", 5)]
