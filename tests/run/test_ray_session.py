"""The start of Ray, played."""

from typing import Any

import pytest

from open_instruct.run import ray_session


def test_ray_may_need_a_second_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its own processes 30 s, which a busy machine may need for something else."""
    attempts: list[dict[str, Any]] = []
    ended: list[str] = []

    def init(**options: Any) -> None:
        attempts.append(options)
        if len(attempts) == 1:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(ray_session, "kill_marked", ended.append)
    ray_session._enter_ray("mark", is_own=False)
    assert (len(attempts), ended) == (2, ["ray", "mark"])
    attempts.clear()
    monkeypatch.setattr(ray_session.ray, "init", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ray_session._enter_ray("mark", is_own=False)
