"""When an engine releases memory, and how it takes the memory back.

    awake ── nothing to do for `after_s` ──► asleep (level 1: weights in main memory, 2: weights dropped; no key-value cache)
      ▲                                         │ a prompt or new weights arrive
      └──── kv_cache ◄── weights ◄──────────────┘        level 2 serves only once new weights have arrived

An engine that sleeps on request wakes only on request, because other processes compute on its device meanwhile.

On CPU vLLM's sleep releases nothing and logs a warning. So the states and their order are the same there, without calls to vLLM.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WEIGHTS = "weights"
KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class SleepOptions:
    """How an engine sleeps."""

    after_s: float | None = None
    """Seconds without work after which the engine sleeps. None: it sleeps only on request."""
    level: int = 1
    calls_vllm: bool = False
    """Whether the device can release memory."""


class EngineSleep:
    """The sleep of one engine. Only the thread that owns the engine uses it."""

    def __init__(self, engine: Any, options: SleepOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._options = options
        self._clock = clock
        self._idle_since = clock()
        self._asleep_since: float | None = None
        self._released: set[str] = set()
        self.needs_weights = False
        """The weights were dropped, so nothing may be generated until new weights have arrived."""
        self.sleeps_on_request = False
        """The engine sleeps on request, so prompts do not wake it."""
        self.num_sleeps = 0
        self.asleep_s = 0.0
        self.memory_released_bytes = 0
        """Memory that the last sleep released, as measured on the devices of the engine."""

    @property
    def is_asleep(self) -> bool:
        return bool(self._released)

    @property
    def may_admit(self) -> bool:
        """Whether prompts may be admitted. Admitting a prompt wakes an engine that sleeps."""
        return not self.needs_weights and not (self.is_asleep and self.sleeps_on_request)

    def note_activity(self) -> None:
        """Note that the engine generates something, or has just done so."""
        self._idle_since = self._clock()

    def sleep_if_due(self) -> None:
        after_s = self._options.after_s
        if after_s is not None and not self.is_asleep and self._clock() - self._idle_since >= after_s:
            self.release()

    def release(self, *, on_request: bool = False, level: int | None = None) -> int:
        """Fall asleep, by default at the level of the options. Returns the number of bytes released."""
        self.sleeps_on_request = on_request
        if self.is_asleep:
            return 0
        level = level or self._options.level
        if self._options.calls_vllm:
            before = self._engine.memory_in_use_bytes()
            self._engine.reset_prefix_cache()
            self._engine.sleep(level)
            self.memory_released_bytes = max(before - self._engine.memory_in_use_bytes(), 0)
        self._released = {WEIGHTS, KV_CACHE}
        self.needs_weights = level == 2
        self._asleep_since = self._clock()
        self.num_sleeps += 1
        return self.memory_released_bytes

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake up, or take back only the memory of `tags`. Weights come back before the key-value cache."""
        for tag in (WEIGHTS, KV_CACHE):
            if tag in self._released and (tags is None or tag in tags):
                if self._options.calls_vllm:
                    self._engine.wake_up([tag])
                self._released.discard(tag)
        if not self._released and self._asleep_since is not None:
            self.asleep_s += self._clock() - self._asleep_since
            self._asleep_since = None
            self.note_activity()

    def weights_came(self) -> None:
        self.needs_weights = False
