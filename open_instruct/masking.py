"""Secrets stay out of logs, messages, tables and what is sent to a tracker."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_LOOKS_SECRET = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}"  # what access tokens look like
    r"|(?<=://)[^/@\s]+(?=@)"  # user:password of an address
    r"|(?i:(?<=[?&])(?:[\w-]*(?:key|token|secret|password|signature|credential)|sig)=[^&\s'\"]+)"  # of its query
    r"|(?i:(?<=bearer ))[\w.~+/-]{8,}=*"
)
_NAMED_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8
"""Shorter values of variables would blot out words that only look like them."""
MASK = "***"


def without_secrets(text: str) -> str:
    """The text with `***` for what looks like a secret, and for the value of each variable whose name says that it is one."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and _NAMED_SECRET.search(name) and not os.path.exists(value):
            text = text.replace(value, MASK)
    return _LOOKS_SECRET.sub(MASK, text)


def masked(value: Any) -> Any:
    """The same in all texts of nested lists and mappings."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: masked(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked, value))
    return value


def mask_tracebacks() -> None:
    """What this process ends with is told without secrets, too."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(without_secrets("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = tell


class MaskingFormatter(logging.Formatter):
    """Masks a whole record, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
