"""The line on the terminal that shows the progress of a run. rich is imported when it is first needed."""

import itertools
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from open_instruct.report.isolation import Isolation

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accuracy:
    """The result of an evaluation."""

    share: float | None
    """Share of right answers, 0 to 1; None if only reward functions score, which do not say what is right."""
    step: int
    """The training step after which the weights were evaluated."""
    reward: float | None = None
    """Mean reward; None: not known."""
    name: str = ""
    """The evaluation set; "" if the run does not measure its sets apart."""

    def __str__(self) -> str:
        if self.share is None:
            return "not measured" if self.reward is None else f"reward {self.reward:.3f}"
        return f"{self.share:.0%}"


@dataclass(frozen=True)
class Progress:
    """Values of a training step that the live line shows."""

    step: int
    """Training steps completed."""
    reward: float
    tokens_per_second: float
    prompt_queue: int
    """Prompts waiting for an engine."""
    result_queue: int
    """Results waiting for the controller."""
    age: float
    """Mean age of the samples of the batch, in weight versions."""
    accuracies: Sequence[Accuracy] = ()
    """The last evaluation of each set."""
    standard_error: float | None = None
    """That of the reward; None with a single group."""
    highest_reward: float | None = None
    """The highest reward that a response can have; None: there is none, or it differs between rows."""
    alarms: Sequence[str] = ()
    """The rules of health whose alarm holds."""

    def __str__(self) -> str:
        maximum = "" if self.highest_reward is None else f" of {self.highest_reward:g}"
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        evaluation = f"  eval {_in_words(self.accuracies)}" if self.accuracies else ""
        alarms = f"  ⚠ {' '.join(self.alarms)}" if self.alarms else ""
        return (
            f"reward {self.reward:.3f}{error}{maximum}  {self.tokens_per_second:,.0f} tok/s  "
            f"queues {self.prompt_queue}/{self.result_queue}  age {self.age:.1f}{alarms}{evaluation}"
        )


def _in_words(accuracies: Sequence[Accuracy]) -> str:
    """`plus 40%, minus 12% (step 20), hard 3% (step 10)`: the step stands behind the last accuracy of the step."""
    groups = itertools.groupby(
        sorted(accuracies, key=lambda accuracy: -accuracy.step), key=lambda accuracy: accuracy.step
    )
    parts = ((step, ", ".join(f"{accuracy.name} {accuracy}".lstrip() for accuracy in group)) for step, group in groups)
    return ", ".join(f"{shares} (step {step})" for step, shares in parts)


class StepProgress(Protocol):
    """An object that `str` turns into the text of the live line, and that knows how many steps are completed."""

    @property
    def step(self) -> int: ...


class ProgressLine:
    """One live line on a terminal. Elsewhere (job logs) it prints a plain line per step, at most one per second; the last step
    always gets its line.

    Use it as a context manager, so that the terminal is restored even after an error.
    """

    MIN_INTERVAL_S = 1.0

    def __init__(self, total: int, *, first_step: int = 0, stream: IO[str] | None = None, unit: str = "step"):
        """`total`: number of the last training step, or of the last `unit`. `first_step`: steps that were completed before this
        process began, which the estimate of the time left ignores."""
        self._total = total
        self._first_step = first_step
        self._unit = unit
        self._stream = stream or sys.stderr
        self._isolation = Isolation("the progress line")
        self._start = time.monotonic()
        self._last_line_at = -math.inf
        self._live: RichProgress | None = None
        self._newest = ""
        """Text of the last step."""
        self._task_id: Any = None
        with self._isolation:
            if self._stream.isatty():
                self._start_live()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=self._stream)
        # The bar fills the width that the text leaves free.
        bar = [BarColumn(bar_width=None)] if console.width >= 100 else []
        text_column = TextColumn("{task.completed}/{task.total}  {task.description}", markup=False)
        self._live = RichProgress(text_column, *bar, console=console, refresh_per_second=4, expand=True)
        text = "waiting for the first batch"
        self._task_id = self._live.add_task(text, total=self._total, completed=self._first_step)
        self._live.start()

    def update(self, progress: StepProgress) -> None:
        """Show a completed step. Never raises."""
        with self._isolation:
            time_left = f"ETA {format_duration(self._seconds_left(progress.step))}"
            self._newest = f"{time_left}  {progress}"
            if self._live is not None:  # a narrow terminal cuts the end of the line
                self._live.update(self._task_id, completed=progress.step, description=self._newest)
            else:
                text = f"{self._unit} {progress.step}/{self._total}  {progress}  {time_left}"
                self._print(text, at_once=progress.step >= self._total)

    def wait(self, text: str) -> None:
        """Show what is under way behind the last step, only on a terminal. Never raises."""
        with self._isolation:
            if self._live is not None:
                self._live.update(self._task_id, description=f"{self._newest}  │ {text}" if self._newest else text)

    def _seconds_left(self, step: int) -> float:
        """Estimated from the mean time per step since the line was started."""
        num_steps = step - self._first_step
        return (self._total - step) * (time.monotonic() - self._start) / num_steps if num_steps > 0 else math.nan

    def _print(self, text: str, *, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self._last_line_at >= self.MIN_INTERVAL_S:
            self._last_line_at = now
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        with self._isolation:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def format_duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`; `?` when unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
