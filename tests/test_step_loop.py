"""The driver's step loop with parts that are played: no Ray, no engine, no learner."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import make_args

from open_instruct import grpo_fast
from open_instruct.checkpoints import STATE_FILE
from open_instruct.run_identity import run_identity
from open_instruct.run_saving import checkpoint_store


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


def test_a_torn_checkpoint_is_no_traceback_before_the_start(tmp_path: Path) -> None:
    """The newest may be torn: the one before is compared. When all are, the user decides."""
    args = make_args(output_dir=str(tmp_path))
    store = checkpoint_store(args)
    for step in (1, 2):
        store.save(step, {"identity": run_identity(args)}, lambda _: {})
    (store.path(2) / STATE_FILE).write_text("")
    assert grpo_fast.resumes_the_same_run(args, None) == []
    assert "--seed was 1, now 2" in grpo_fast.resumes_the_same_run(make_args(output_dir=str(tmp_path), seed=2), None)[0]
    (store.path(1) / STATE_FILE).write_text("{")
    [mistake] = grpo_fast.resumes_the_same_run(args, None)
    assert mistake.startswith(
        f"--output_dir {tmp_path}: none of its checkpoints is whole: {store.path(2)} (its run_state"
    )
    assert mistake.endswith("Remove them to start anew, or give another one.")
