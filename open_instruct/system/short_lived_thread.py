"""Calls that compute in a thread of their own, which ends with the call.

OpenMP keeps a pool of workers for each thread that has ever computed in parallel. As soon as the pools of a process have more
threads than the machine has cores, libgomp lets waiting workers sleep at once instead of spinning for some milliseconds, and each
of the hundreds of parallel parts of an engine step begins with a wake-up: the step takes up to 1.7 times as long (measured
with vLLM on two cores). A pool ends with its thread. So whatever computes beside the engine thread does it in a thread that ends.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_short_lived_thread(call: Callable[[], T]) -> T:
    """What `call` returns or raises."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="short_lived", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        thread.join()
