"""Threads of an actor: how the error of one of them is told."""

import pytest
import ray

from open_instruct.cluster.failures import failure_of
from open_instruct.system.work_threads import ThreadFailed, WorkThreads


class TooFew(RuntimeError): ...


def test_the_error_of_a_thread_is_told_once_and_by_the_name_of_its_actor() -> None:
    threads = WorkThreads("the controller")
    threads.raise_error()
    threads.fail(TooFew("100% of the responses were not scored"))
    with pytest.raises(ThreadFailed) as raised:
        threads.raise_error()
    through_ray = ray.exceptions.RayTaskError("take", "a traceback", raised.value)
    message = "the controller failed: TooFew: 100% of the responses were not scored"
    assert failure_of("the controller", through_ray) == message
    assert failure_of("training step 3", through_ray) == f"training step 3 failed: {message}"
    assert failure_of("training step 3", TooFew("none")) == "training step 3 failed: TooFew: none"
