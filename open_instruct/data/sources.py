"""Rows of the source that a mixer entry names, read as a stream: reasoning-gym, local files, directories, hub names.

Rows are not checked here. A source must have the requested columns, or the columns of the document's sample format
(`sample_record.py`). Local files are read in place. Only a directory or a hub name is loaded with `datasets`, which keeps a copy
under `cache_dir` (None: in its own default directory). The name of such a data set may also choose a configuration and a
revision: `openai/gsm8k?config=main&revision=v1`.
"""

import codecs
import contextlib
import functools
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from open_instruct.data.row_places import PlaceInSource
from open_instruct.data.sample_record import COLUMNS, has_proto_columns
from open_instruct.data.short_floats import as_written
from open_instruct.verifiers.reasoning_gym_data import is_reasoning_gym, iter_reasoning_gym_rows

if TYPE_CHECKING:
    import datasets

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
LONGEST_NAME = 200
"""Longest name of a data set on the hub, in characters."""
BATCH_ROWS = 1000
QUERY_MARK = "?"
"""Separates the name of a directory or hub data set from its configuration and revision."""
CONFIG_MARK = f"{QUERY_MARK}config="


class RawRow(NamedTuple):
    """A row as the source has it, or the problem with the row."""

    place: PlaceInSource
    values: dict[str, object]
    problem: str | None = None


Columns = Sequence[tuple[str, ...]]
"""The columns to read: from each tuple, the first column that exists. If a tuple ends with an empty name, none need exist."""


class SourceError(ValueError):
    """A source that cannot be read at all."""


def iter_rows(name: str, split: str, columns: Columns | None, cache_dir: str | None) -> Iterator[RawRow]:
    """The rows of one mixer entry, in order. `split` is used only for directories and hub names, because a file has one split.
    `columns` None means all columns.

    Raises:
        SourceError: the source does not exist, cannot be read, or lacks one of `columns`. Some of these errors are raised only
            when the rows are iterated.
    """
    if is_reasoning_gym(name):
        return _reasoning_gym(name)
    name, mark, settings = name.partition(QUERY_MARK)
    if mark and settings in ("", "config="):
        raise SourceError(
            f"{CONFIG_MARK} names no configuration. Write its name behind {CONFIG_MARK}, or leave this out"
        )
    path = Path(name)
    if settings and os.path.isfile(path):
        raise SourceError(f"a file has no configurations. Leave out {mark}{settings}")
    if path.suffix in FILE_SUFFIXES:
        if not os.path.isfile(path):
            raise SourceError("there is no such file" + _seen_from(path))
        readers = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
        return readers[path.suffix](path, columns)
    if os.path.isfile(path):
        raise SourceError(f"the name of a data file must end in one of {', '.join(FILE_SUFFIXES)}")
    if (name.startswith(("/", "./", "../")) or len(name) > LONGEST_NAME) and not os.path.isdir(path):
        raise SourceError("there is no such file or directory")
    return _hub(name, settings, split, columns, cache_dir)


def source_name(name: str, split: str) -> str:
    """The name of a source beside the places of its rows. Only a directory or a hub data set has several splits."""
    is_one_file = is_reasoning_gym(name) or Path(name).suffix in FILE_SUFFIXES
    return name if is_one_file else f"{name} (split {split})"


def _seen_from(path: Path) -> str:
    return "" if path.is_absolute() else f" (looked in {Path.cwd()})"


def _reasoning_gym(entry: str) -> Iterator[RawRow]:
    try:
        for number, row in enumerate(iter_reasoning_gym_rows(entry)):
            yield RawRow(PlaceInSource("index", number), row)
    except ValueError as err:
        raise SourceError(str(err)) from err


def _json_lines(path: Path, columns: Columns | None) -> Iterator[RawRow]:
    """Rows of a `.jsonl` file. It may also hold one JSON array of objects, as some programs write it."""
    start = _start_of(path)
    if start.startswith(b"["):
        with contextlib.suppress(SourceError):  # then it is lines, and each is a mistake of its own
            yield from _json_array(path)
            return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield _json_row(PlaceInSource("line", number), line)


def _start_of(path: Path) -> bytes:
    """The beginning of a file, without spaces and without a byte order mark. Raises `SourceError` for UTF-16."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError("is written in UTF-16. Save it as UTF-8")
    return start.removeprefix(codecs.BOM_UTF8).lstrip()


def _json_row(place: PlaceInSource, line: bytes) -> RawRow:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as err:  # bytes that are not UTF-8 are a ValueError too
        return RawRow(place, {}, f"broken JSON: {err}")
    if not isinstance(values, dict):
        return RawRow(place, {}, f"a row must be a JSON object, got {type(values).__name__}")
    return RawRow(place, values)


def _json(path: Path, columns: Columns | None) -> Iterator[RawRow]:
    """Rows of a `.json` file: a JSON array of objects if it begins with `[`, else JSON lines."""
    yield from _json_array(path) if _start_of(path).startswith(b"[") else _json_lines(path, columns)


def _json_array(path: Path) -> Iterator[RawRow]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as err:
        raise SourceError(f"broken JSON: {err}") from err
    for number, values in enumerate(rows, start=1):
        problem = None if isinstance(values, dict) else f"a row must be a JSON object, got {type(values).__name__}"
        yield RawRow(PlaceInSource("row", number), {} if problem else values, problem)


def _parquet(path: Path, columns: Columns | None) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = _columns_to_read(file.schema_arrow.names, columns)
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                row_as_written = as_written(pa.struct(batch.schema))
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(PlaceInSource("row", number), row_as_written(values))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise SourceError(f"not a readable parquet file: {err}") from err


def _hub(name: str, settings: str, split: str, columns: Columns | None, cache_dir: str | None) -> Iterator[RawRow]:
    dataset = _load_hub(name, settings, split, cache_dir)
    names = _columns_to_read(list(dataset.column_names), columns)
    row_as_written = as_written(dataset.features.type)
    for number, values in enumerate(dataset.select_columns(names), start=1):
        yield RawRow(PlaceInSource("row", number), row_as_written(dict(values)))  # type: ignore[call-overload]


def content_of_hub(entry: str, split: str, cache_dir: str | None = None) -> str:
    """A text that identifies the rows of a hub data set or of a directory: other rows have another text."""
    name, _, settings = entry.partition(QUERY_MARK)
    return _load_hub(name, settings, split, cache_dir)._fingerprint


def hub_settings(settings: str) -> tuple[str | None, str | None]:
    """Configuration and revision from `config=main&revision=v1`. Raises `SourceError` for any other form."""
    values = {name: value for name, _, value in (part.partition("=") for part in settings.split("&") if part)}
    config, revision = values.pop("config", None), values.pop("revision", None)
    if values:
        raise SourceError(f"?{settings}: it may name config and revision, such as ?config=main&revision=v1")
    return config, revision


@functools.lru_cache(maxsize=8)
def _load_hub(name: str, settings: str, split: str, cache_dir: str | None) -> "datasets.Dataset":
    import datasets

    config, revision = hub_settings(settings)
    try:
        is_offline = not (os.path.isdir(name) or datasets.config.HF_HUB_OFFLINE or _hub_answers())
        with _offline_if(is_offline), _without_progress_bars():
            revised = {} if revision is None else {"revision": revision}
            dataset = datasets.load_dataset(name, config, split=split, cache_dir=cache_dir, **revised)  # type: ignore[call-overload]
    except Exception as err:  # network, hub and format errors have no common base class; the user sees all of them
        subject = "this directory" if os.path.isdir(name) else "no file or directory here, and as a hub name it"
        part = f"split {split!r}" + (f", configuration {config!r}" if config else "")
        reason = " ".join(str(err).split())
        cure = "" if config or "Config" not in reason else f" (a configuration is named like {name}{CONFIG_MARK}main)"
        reason += cure + _cause(err) + (_broken_row(Path(name)) if os.path.isdir(name) else "")
        raise SourceError(f"{subject} could not be loaded, {part}: {type(err).__name__}: {reason}") from err
    assert isinstance(dataset, datasets.Dataset), type(dataset)
    return dataset


def _cause(error: Exception) -> str:
    """The cause of an error whose own message says only that the rows could not be read."""
    import datasets

    cause = error.__cause__
    if cause is None or not isinstance(error, datasets.exceptions.DatasetGenerationError):
        return ""
    return f": {type(cause).__name__}: {' '.join(str(cause).split())}"


def _broken_row(directory: Path) -> str:
    """The first broken JSON row in a directory, in brackets, because `datasets` does not name the file; "" if there is none."""
    for path in sorted(path for path in directory.rglob("*") if path.suffix in (".jsonl", ".json") and path.is_file()):
        try:
            if path.suffix == ".json" and _is_json(path):
                continue  # it may describe the data
            rows = _json_lines(path, None) if path.suffix == ".jsonl" else _json(path, None)
            problem = next((f" {row.place}: {row.problem}" for row in rows if row.problem), None)
        except (SourceError, OSError) as err:
            problem = f": {err}"
        if problem:
            return f" ({path}{problem})"
    return ""


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _hub_answers() -> bool:
    """Whether the hub's host accepts a connection. Behind a proxy this is not tested, and the result is True."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return True
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _offline_if(offline: bool) -> Iterator[None]:
    """If `offline`, `datasets` (5.2.0) uses only its cache in the block. It would try to reach the hub for half a minute."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Inside the block `datasets` draws no progress bars, because they would break up messages."""
    import datasets

    are_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not are_off:
            datasets.enable_progress_bars()


def _columns_to_read(file_columns: Sequence[str], columns: Columns | None) -> list[str]:
    if columns is None:
        return list(file_columns)
    matches = [next((name for name in names if name in file_columns or not name), None) for names in columns]
    missing = [names[0] for names, name in zip(columns, matches, strict=True) if name is None]
    if missing and has_proto_columns(file_columns):
        optional = [name for names in columns if not names[-1] for name in names if name]
        return [column for column in file_columns if column in (*COLUMNS, *optional)]
    if missing:
        raise SourceError(
            f"has no column {', '.join(missing)}; it has: {', '.join(file_columns)} "
            "(--sft_messages_key, --ground_truths_key and --default_verifier say what to read)"
        )
    return [name for name in matches if name]
