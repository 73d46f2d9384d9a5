"""Addresses of the servers that verifiers ask. They are checked before a run, and messages show them without the login."""

import urllib.parse


def check_address(source: str, address: str) -> None:
    """Raises `ValueError` unless `address` names a server that speaks HTTP.

    Args:
        source: the option or environment variable that holds the address.
    """
    if _is_complete(address):
        return
    url = without_login(address)
    example = f"http://{url}" if _is_complete(f"http://{url}") and "://" not in url else "http://localhost:8000/v1"
    raise ValueError(
        f"{source} {url}: an address begins with http:// or https://, and then names a server. Write it like {example}"
    )


def _is_complete(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or an unpaired bracket
        return False


def host_of(address: str) -> str:
    """The server's name, in lower case, in an address that `check_address` accepts."""
    return urllib.parse.urlsplit(address).hostname or ""


def without_login(address: str) -> str:
    """`http://host/v1` for `http://user:password@host/v1`."""
    scheme, mark, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    return scheme + mark + place.rpartition("@")[2] + slash + path
