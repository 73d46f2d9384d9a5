"""Runs a call in a thread of its own, which ends with the call.

OpenMP keeps a pool of workers for each thread that has ever computed in parallel. As soon as the pools of a process have more
threads than the machine has cores, libgomp lets waiting workers sleep at once instead of spinning for some milliseconds. Then
each of the hundreds of parallel parts of an engine step begins with a wake-up, and the step takes up to 1.7 times as long
(measured with vLLM on two cores). A pool ends with its thread. So computations outside the engine thread run in threads that end.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_short_lived_thread(call: Callable[[], T]) -> T:
    """Run `call` in a new thread, and return or raise what it returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="short_lived", daemon=True)
    thread.start()
    try:
        return future.result()
    finally:
        thread.join()
