"""What a run tells while it runs: `metrics.jsonl`, wandb, the live line and the log file.

wandb and the live line watch a run and may never stop it; `metrics.jsonl` is part of a run's state and resumes with it.
wandb and rich are imported when first needed. The end of a run is told by `run_summary.py`.
"""

import contextlib
import json
import logging
import math
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import psutil

from open_instruct.storage.checkpoints import sync_to_disk
from open_instruct.system.background import Background
from open_instruct.system.masking import MaskingFormatter, masked

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

logger = logging.getLogger(__name__)

STEP_KEY = "training_step"
_ROW_START = re.compile(rb'\{"training_step": (\d+)[,}]')
"""Of a row as `MetricsWriter` writes it."""
WANDB_INIT_TIMEOUT_S = 20.0
WANDB_FINISH_TIMEOUT_S = 30.0
WANDB_ANSWER_TIMEOUT_S = 5.0
WANDB_GRACE_S = 5.0
"""Beyond its own limit, for wandb to notice it."""
WANDB_MAX_ROWS_WAITING = 1000
"""Rows of metrics that wandb has not taken yet; further ones are left out there."""


class Isolation(contextlib.AbstractContextManager[None]):
    """Swallows what goes wrong inside it and warns of the first time; for what watches a run and may not stop it."""

    def __init__(self, what: str):
        self.what = what
        self.failed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.failed:
            self.failed = True
            logger.warning("%s failed; the run goes on without: %s: %s", self.what, type(error).__name__, error)
        return True


def write_atomically(path: str | Path, content: bytes) -> None:
    """Replace the file `path` as a whole: whoever reads it, also after a kill, finds the old or the new content."""
    with _replaced(Path(path)) as file:
        file.write(content)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends without an error; it is on the disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_to_disk([path.parent])


def to_json_value(value: Any) -> Any:
    """`value` as what JSON knows: numpy and torch scalars and arrays become Python's, what is not finite None."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json_value(value.tolist())
    return str(value)


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


class MetricsWriter:
    """One JSON object a line, one line a training step; each is on its way to disk when `write` returns.

    Every line is strict JSON: a metric that is not finite is written as null, and warned of once by name.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._warned: set[str] = set()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        # Unbuffered: a line is one write, so that a kill between two lines tears none.
        return open(self.path, "ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of training step `step`; it bears `training_step` beside `metrics`."""
        row = to_json_value({STEP_KEY: step, **metrics})
        for key in {key for key, value in row.items() if value is None and metrics.get(key) is not None} - self._warned:
            self._warned.add(key)
            logger.warning("metric %s is not finite at step %d; written as null", key, step)
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        """All of it or nothing: on a full disk a part may be taken, which would be a torn row."""
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def sync(self) -> None:
        """All rows are on the disk when this returns."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> int:
        """Cut the rows after training step `step`, and a last line that a kill tore; returns how many lines went.

        For resuming from a checkpoint of `step`: the steps after it are going to be written again. The file is gone through line
        by line, since that of a long run may be larger than the memory.
        """
        num_cut = num_kept_behind = first_cut = at = 0
        with open(self.path, "rb") as file:
            for line in file:
                if _is_of(line, step):
                    num_kept_behind += num_cut > 0
                else:
                    first_cut = first_cut if num_cut else at
                    num_cut += 1
                at += len(line)
        if num_kept_behind:
            self._rewrite(step)
        elif num_cut:  # they are the end of the file, as a run writes them
            self._file.truncate(first_cut)
            os.fsync(self._file.fileno())
        return num_cut

    def _rewrite(self, step: int) -> None:
        """Keep the rows up to `step` wherever they stand."""
        self._file.close()
        with open(self.path, "rb") as file, _replaced(self.path) as beside:
            beside.writelines(line for line in file if _is_of(line, step))
        self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_of(line: bytes, step: int) -> bool:
    """Whether a line is the row of this step or of an earlier one."""
    if line.endswith(b"}\n") and (start := _ROW_START.match(line)):  # parsing 0.7 GB takes a quarter of a minute
        return int(start[1]) <= step
    row = _parse_row(line)
    return row is not None and row[STEP_KEY] <= step


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and STEP_KEY in row else None


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, also of one that is being written: a torn line is passed over."""
    with open(path, "rb") as file:
        for line in file:
            if (row := _parse_row(line)) is not None:
                yield row


# --- wandb ------------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """Where metrics go beside `metrics.jsonl`."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


class NullTracker:
    """Tracks nothing."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


@dataclass(frozen=True)
class TrackerOptions:
    """How a run is found in wandb."""

    project: str
    name: str
    run_id: str
    """The same after a resumption, so that it goes on in the same curve. Letters, digits, `-` and `_`."""
    output_dir: str
    """Its `wandb/` holds wandb's files, and an offline run for `wandb sync`."""
    entity: str | None = None
    group: str | None = None


class WandbTracker:
    """The keys of `metrics.jsonl` in wandb. Made by `make_tracker`."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        import wandb

        self._isolation = Isolation("wandb")
        self._background = Background("wandb", WANDB_MAX_ROWS_WAITING)
        self._num_left_out = 0
        self._wandb = wandb
        if self._can_go_online():
            try:
                self._run = self._init(options, config, mode="online")
            except Exception as error:
                logger.warning("wandb is out of reach, tracking offline: %s: %s", type(error).__name__, error)
                # What is left of the failed attempt holds the run's id.
                wandb.teardown()
                self._run = self._init(options, config, mode="offline")
        else:
            self._run = self._init(options, config, mode="offline")
        # A resumed run writes steps again that wandb has seen; its own step counter would refuse them.
        self._run.define_metric("*", step_metric=STEP_KEY)

    def _can_go_online(self) -> bool:
        if os.environ.get("WANDB_MODE", "online") != "online":
            return False
        # Without `prompt=False` wandb asks for the key on a terminal.
        if not self._wandb.login(prompt=False, verify=False, timeout=int(WANDB_INIT_TIMEOUT_S)):
            logger.warning("wandb has no key (WANDB_API_KEY): tracking offline")
            return False
        url = self._wandb.setup().settings.base_url
        # wandb itself takes 40 s to find out.
        if not answers(url, timeout_s=WANDB_ANSWER_TIMEOUT_S):
            logger.warning("%s does not answer: tracking offline", url)
            return False
        return True

    def _init(self, options: TrackerOptions, config: Mapping[str, Any], *, mode: Literal["online", "offline"]) -> Any:
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            init_timeout=WANDB_INIT_TIMEOUT_S,
            finish_timeout=WANDB_FINISH_TIMEOUT_S,
            console="off",  # the live line is not for a log
        )
        return self._wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=options.name,
            id=options.run_id,
            dir=options.output_dir,
            config=to_json_value(config),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand a row over; wandb may hang (its helper, a file system), and no step waits for it."""
        row = {STEP_KEY: step, **metrics}
        if not self._background.submit(lambda: self._log(row)):
            if self._num_left_out == 0:
                logger.warning("wandb hangs: the run goes on, and leaves rows out there (metrics.jsonl has them all)")
            self._num_left_out += 1

    def _log(self, row: Mapping[str, Any]) -> None:
        with self._isolation:
            self._run.log({key: self._to_wandb(value) for key, value in row.items()})

    def _to_wandb(self, value: Any) -> Any:
        value = to_json_value(value)
        return self._wandb.Histogram(value) if isinstance(value, list) and value else value

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left, for at most `WANDB_FINISH_TIMEOUT_S`, and end wandb's helper process, if need be by force."""
        if not self._background.end(lambda: self._finish(exit_code), WANDB_FINISH_TIMEOUT_S + WANDB_GRACE_S):
            logger.warning(
                "wandb hangs: what it has not sent yet is left behind. metrics.jsonl has all rows (left out there: %d)",
                self._num_left_out,
            )
            _kill_helpers()  # at the end of this process wandb would wait for them

    def _finish(self, exit_code: int) -> None:
        with self._isolation:
            self._run.finish(exit_code=exit_code)
        with self._isolation:
            self._wandb.teardown(exit_code=exit_code)


def _kill_helpers() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "wandb" in child.name():
                child.kill()


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether an HTTP server is there, through the proxy if one is set; what it answers does not matter."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # Certificates are for wandb to judge, which may know others.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def make_tracker(with_tracking: bool, options: TrackerOptions, config: Mapping[str, Any]) -> Tracker:
    """wandb if asked for; offline when there is no network or key; nothing when wandb cannot be started at all.

    Asks no question; without a network it takes some seconds, with one that fails half-way less than a minute.
    """
    if with_tracking:
        with Isolation("wandb"):
            return WandbTracker(options, masked(config))
    return NullTracker()


# --- the live line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """What the live line shows of a training step."""

    step: int
    """Training steps completed."""
    reward: float
    tokens_per_second: float
    prompt_queue: int
    """Prompts waiting for an engine."""
    result_queue: int
    """Results waiting for the controller."""
    age: float
    """Mean staleness of the batch, in weight versions."""
    eval_accuracy: float | None = None
    """Of the last evaluation, 0 to 1."""

    def __str__(self) -> str:
        accuracy = "" if self.eval_accuracy is None else f"  eval {self.eval_accuracy:.0%}"
        return (
            f"reward {self.reward:.3f}  {self.tokens_per_second:,.0f} tok/s  "
            f"queues {self.prompt_queue}/{self.result_queue}  age {self.age:.1f}{accuracy}"
        )


class StepProgress(Protocol):
    """Shown as text, with the number of what is completed."""

    @property
    def step(self) -> int: ...


class ProgressLine:
    """One live line on a terminal; elsewhere (job logs) a plain line per step, at most one a second, always the last.

    Use as a context manager, so that the terminal is given back whatever happens.
    """

    MIN_INTERVAL_S = 1.0

    def __init__(self, total: int, *, first_step: int = 0, stream: IO[str] | None = None, unit: str = "step"):
        """`total`: the last training step, or `unit` of another kind. `first_step`: those completed before this process, for the
        time left."""
        self._total = total
        self._first_step = first_step
        self._unit = unit
        self._stream = stream or sys.stderr
        self._isolation = Isolation("the progress line")
        self._start = time.monotonic()
        self._last_line_at = -math.inf
        self._live: RichProgress | None = None
        self._task_id: Any = None
        with self._isolation:
            if self._stream.isatty():
                self._start_live()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=self._stream)
        # The bar takes what room the text leaves.
        bar = [BarColumn(bar_width=None)] if console.width >= 100 else []
        text_column = TextColumn("{task.completed}/{task.total}  {task.description}", markup=False)
        self._live = RichProgress(text_column, *bar, console=console, refresh_per_second=4, expand=True)
        text = "waiting for the first batch"
        self._task_id = self._live.add_task(text, total=self._total, completed=self._first_step)
        self._live.start()

    def update(self, progress: StepProgress) -> None:
        """Show a completed step. Never raises."""
        with self._isolation:
            seconds_left = format_duration(self._seconds_left(progress.step))
            text = f"{progress}  ETA {seconds_left}"
            if self._live is not None:
                self._live.update(self._task_id, completed=progress.step, description=text)
            else:
                self._print(f"{self._unit} {progress.step}/{self._total}  {text}", at_once=progress.step >= self._total)

    def _seconds_left(self, step: int) -> float:
        """From the mean time per step of this process, start of the line included."""
        done = step - self._first_step
        return (self._total - step) * (time.monotonic() - self._start) / done if done > 0 else math.nan

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


# --- the log ----------------------------------------------------------------------------------------------------------


class _StderrHandler(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the moment: the live line puts itself there, and log lines go above it."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        pass


class _FileHandler(logging.FileHandler):
    """Says once that the file cannot be written, instead of a traceback for each line."""

    _has_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_told:
            self._has_told = True
            print(f"{self.baseFilename} cannot be written ({error}); the log goes on here alone", file=sys.stderr)


COMPONENTS = "open_instruct.components"
"""Name of the logger on the events of single components: too much for the terminal."""


def setup_logging(output_dir: str | Path, verbose: bool = False, *, component_log: str | None = None) -> Path:
    """Send the driver's log to `output_dir/logs/driver.log` and to stderr; returns the file's path. With `component_log` there is
    a file of that name too, in the format that the fully async policy documents.

    stderr shows this package's INFO and everybody's warnings; with `verbose` what the file holds in any case: this
    package's DEBUG and everybody's INFO. Calling it again moves the log.
    """
    path = Path(output_dir) / "logs" / "driver.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [_FileHandler(path), _StderrHandler()]
    formatter = MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    for handler in handlers:
        handler.setFormatter(formatter)
    if component_log is not None:
        handlers.append(_FileHandler(Path(output_dir) / component_log))
        handlers[-1].setFormatter(MaskingFormatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    if not verbose:
        handlers[1].addFilter(_is_for_the_user)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "_open_instruct", False)]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler._open_instruct = True  # pyrefly: ignore
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("open_instruct").setLevel(logging.DEBUG)
    return path


def _is_for_the_user(record: logging.LogRecord) -> bool:
    ours = record.name == "__main__" or record.name.startswith("open_instruct")
    return record.levelno >= (logging.INFO if ours and record.name != COMPONENTS else logging.WARNING)
