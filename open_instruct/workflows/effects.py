"""Catches a rollout that reads a clock, draws a random number or opens a connection without using its context.

A rollout must depend only on the effects that it asks its context for. Nothing records these effects yet; the rule keeps the way
open to recording and replaying them. While a step of a workflow's coroutine runs, a profile function sees each call of a builtin
and raises an error for the calls in `FORBIDDEN`. The profile function is off inside the context's own methods, in tools, and
between two steps.
"""

import asyncio
import contextvars
import datetime
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")

CLOCKS = (
    *(time.time, time.monotonic, time.perf_counter, time.process_time, time.time_ns, time.monotonic_ns),
    *(time.perf_counter_ns, time.sleep, time.localtime, time.gmtime),
)
FORBIDDEN = {*CLOCKS, os.urandom, os.getrandom}
NOW = {"now", "today", "utcnow"}
MAY_READ_THE_CLOCK = {"logging", "importlib", "transformers", "jinja2"}
"""Packages that read the clock to put the time into a log line, or the date into a chat template."""

OF_THE_COLLECTOR = {"__del__", "gc_callback"}
"""Functions that the garbage collector may call at any time. What they call is not the rollout's doing."""

_in_rollout = contextvars.ContextVar("in_rollout", default=False)


class EffectOutsideContext(RuntimeError):
    """A workflow had an effect without using its context. The message says where, and what to use instead."""


def watched(rollout: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
    """Watch the coroutine of a workflow, and the tasks that it creates if the event loop uses `task_factory`.

    Raises:
        EffectOutsideContext: from the `await`.
    """

    async def run() -> Result:
        outside = _in_rollout.set(True)
        try:
            return await _Watched(rollout)
        finally:
            _in_rollout.reset(outside)

    return run()


def task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    """For `loop.set_task_factory`: tasks that a watched rollout creates are watched too."""
    context = options.get("context")
    if _in_rollout.get() if context is None else context.get(_in_rollout, False):
        coroutine = _awaiting(_Watched(coroutine))
    return asyncio.Task(coroutine, loop=loop, **options)


@contextmanager
def allowed() -> Iterator[None]:
    """Effects inside the block are allowed, because the context itself causes them."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


async def _awaiting(awaitable: Awaitable[Result]) -> Result:
    return await awaitable


class _Watched(Awaitable[Result]):
    """Steps a coroutine with the profile function on."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Result]:
        error: BaseException | None = None
        while True:
            try:
                waited_for = self._step(error)
            except StopIteration as end:
                return end.value
            try:
                yield waited_for
                error = None
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as raised:  # a cancellation, or the future's error: the coroutine handles it
                error = raised

    def _step(self, error: BaseException | None) -> Any:
        position = _numpy_position()
        refused: list[EffectOutsideContext] = []
        profile = sys.getprofile()
        sys.setprofile(partial(_refuse_effects, refused))
        try:
            return self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        finally:
            sys.setprofile(profile)
            if refused:  # raise it again, because the rollout's own code may have caught it in a broad `except`
                raise refused[0]
            # the profile function sees only builtins, which numpy's generators are not
            if position != _numpy_position():
                raise EffectOutsideContext(f"{self._coroutine.__qualname__} draws from numpy.random; {CURE}")


CURE = "a rollout reads the clock through ctx.now(), random numbers through ctx.random(), and the network through ctx.call()"


def _numpy_position() -> int:
    return np.random.get_state(legacy=False)["state"]["pos"]  # type: ignore[call-overload,index]


def _refuse_effects(refused: list[EffectOutsideContext], frame: FrameType, event: str, function: Any) -> None:
    if event != "c_call" or not _is_effect(function):
        return
    caller: FrameType | None = frame
    while caller is not None:
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if package in MAY_READ_THE_CLOCK or caller.f_code.co_name in OF_THE_COLLECTOR:
            return
        caller = caller.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    refused.append(EffectOutsideContext(f"{where} calls {function.__qualname__}; {CURE}"))
    raise refused[-1]


def _is_effect(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if owner is random._inst or isinstance(owner, random.SystemRandom):  # type: ignore[attr-defined]
        return True
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return function.__name__ in NOW
    if isinstance(owner, socket.socket):
        return function.__name__ == "connect"
    try:
        return function in FORBIDDEN
    except TypeError:  # a method of an object that is not hashable
        return False
