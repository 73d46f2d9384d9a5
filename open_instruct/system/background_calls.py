"""Makes calls one after another in a separate thread, so that no other thread waits for them."""

import queue
import threading
import time
from collections.abc import Callable


class BackgroundCalls:
    """Makes calls in order. A call that hangs delays only the calls after it, and does not keep the process from ending."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> bool:
        """Add a call; False if there is no room for it. The call must catch its own errors, because an error ends the thread."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def end(self, last_call: Callable[[], None], timeout_s: float) -> bool:
        """Make `last_call` after all waiting calls. Returns whether all of them were made within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        try:
            for call in (last_call, None):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
