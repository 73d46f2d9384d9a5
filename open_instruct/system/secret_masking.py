"""Keeps secrets out of logs, messages, tables and the data that is sent to a tracker."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

_LOOKS_SECRET = re.compile(
    r"(?<=://)[^/@\s'\":]*:[^\s'\"]*(?=@)"  # user:password of an address; `@` and `/` in it should be escaped but may not be
    r"|(?<=://)[^/@\s'\"]+(?=@)"
    r"|\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|npm_|xox[abp]-|AKIA|AIza|ya29\.|eyJ)[\w.-]{8,}"  # what access tokens look like
    r"|(?i:(?<=[?&])(?:[\w-]*(?:key|token|secret|pass|password|pwd|auth|signature|credential)|sig)=[^&\s'\"]+)"  # of a query
    r"|(?i:(?<=bearer ))[\w.~+/-]{8,}=*"
)
_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|(?:x-)?api-key|x-auth-token)(['\"]?\s*[:=]\s*['\"]?)((?:bearer|basic|token)\s+)?[^\s'\",]+",
    re.IGNORECASE,
)
_NAMED_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_PASS$|_PWD$|_AUTH$", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")
SHORTEST = 8
"""Values of variables with fewer characters are not masked, because they may equal ordinary words."""
MASK = "***"


def without_secrets(text: str) -> str:
    """The text with `***` in place of secrets: everything that looks like a secret, the value of each environment variable whose
    name says that it is a secret, and passwords in variables that hold an address (such as a proxy's).
    """
    for secret in _secrets_of_environment():
        if (
            len(secret) >= SHORTEST and secret in text and not os.path.exists(secret)
        ):  # the path of a file that holds a secret is not a secret
            text = text.replace(secret, MASK)
    return _HEADER.sub(rf"\1\2\3{MASK}", _LOOKS_SECRET.sub(MASK, text))


def _secrets_of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if _NAMED_SECRET.search(name):
            yield value
        else:
            yield from _IN_ADDRESS.findall(value)


def masked(value: Any) -> Any:
    """`value` with `without_secrets` applied to every string in nested lists and mappings."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: masked(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked, value))
    return value


def mask_tracebacks() -> None:
    """Mask secrets in the traceback if this process ends with an error."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(without_secrets("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = tell


class MaskingFormatter(logging.Formatter):
    """Masks secrets in a whole log record, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
