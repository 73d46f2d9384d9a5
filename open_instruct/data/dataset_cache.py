"""Keeps checked and tokenized datasets on disk, under a hash of everything that they are made from.

A dataset is found again only if nothing has changed: the rows of its sources, tokenizer and chat template, the libraries that
tokenize, options, verifiers, workflow, user files, and the code that reads rows. So a cache is never out of date, and removing it
is always safe. The cache does not know whether this machine can score the rows; `run_inputs.py` checks that.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.data.load_report import LoadReport, SourceReport
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.sources import SourceError, content_of_hub
from open_instruct.verifiers.reasoning_gym_data import HASH_ORDERED_TASKS, PREFIX

logger = logging.getLogger(__name__)

WORTH_KEEPING_S = 5.0
"""Datasets that take less time to make are not kept."""
CODE = "data", "verifiers", "workflows", "environments", "chat_codec.py", "chat_templates.py"
"""The parts of the package that decide how rows become prompts."""


class DatasetCache:
    """Datasets in a directory, each in a file `<hash>.npz`.

    Args:
        directory: None: no dataset is kept, and none is found.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def find(self, key: str) -> tuple[PromptDataset, LoadReport] | None:
        """The dataset and its report, or None. A file that cannot be read counts as absent."""
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                report = json.loads(arrays["report"].tobytes())
                dataset = PromptDataset.from_arrays({name: arrays[name] for name in arrays.files if name != "report"})
                return dataset, LoadReport(tuple(SourceReport(**source) for source in report))
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            logger.warning("%s: a dataset that was kept cannot be read (%s) and is made again", path, error)
            return None

    def keep(self, key: str, dataset: PromptDataset, report: LoadReport) -> None:
        """Write the file completely or not at all. If the disk has no room, nothing is kept."""
        path = self._path(key)
        if path is None:
            return
        report_bytes = np.frombuffer(json.dumps([asdict(source) for source in report.sources]).encode(), dtype=np.uint8)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
                try:
                    np.savez(file, **{"report": report_bytes} | dataset.arrays())  # type: ignore[arg-type]
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            logger.warning("%s: the tokenized data are not kept: %s", path.parent, error.strerror or error)

    def _path(self, key: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{key}.npz"


def default_directory() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "local_dataset_cache"


def cache_key(sources: Sequence[tuple[str, Any, str]], facts: Mapping[str, Any], modules: Sequence[str]) -> str | None:
    """A hash of everything that a dataset depends on; None if a source cannot be read.

    Args:
        sources: name, amount and split of each source. Hub datasets are loaded to identify their content.
        facts: tokenizer and options, as JSON values.
        modules: user files that take part.
    """
    contents = [_content(name, split) for name, _, split in sources]
    code = [_hash_of_file(Path(module)) if os.path.isfile(module) else None for module in modules]
    if None in contents or None in code:
        return None
    entries = [list(map(str, source)) for source in sources]
    parts = json.dumps([entries, contents, code, facts, _code()], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _content(name: str, split: str) -> str | None:
    """A text that identifies the rows of a source. None if the source cannot be read; reading its rows reports the error."""
    if name.startswith(PREFIX):
        task = name.removeprefix(PREFIX).partition("?")[0]
        hash_seed = os.environ.get("PYTHONHASHSEED") if task in HASH_ORDERED_TASKS else None
        try:
            return f"reasoning-gym {version('reasoning-gym')}, hash seed {hash_seed}"
        except PackageNotFoundError:
            return None
    if os.path.isfile(name):
        return _hash_of_file(Path(name))
    try:
        return content_of_hub(name, split)
    except SourceError:
        return None


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _code() -> str:
    root = Path(__file__).parents[1]
    files = [
        path
        for part in CODE
        for path in ([root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py")))
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
