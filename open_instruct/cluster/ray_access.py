"""Who can reach the Ray that a run starts: this machine alone, with a token that nobody else can read.

Whoever reaches a Ray cluster without a token runs what they like on it.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants, services

TOKEN = Path(".ray") / "auth_token"
"""Ray's own place for it, under the home directory."""


def is_there_a_cluster() -> bool:
    """Whether `ray.init` would join a cluster: the one of RAY_ADDRESS, or one that `ray start` has started on this machine."""
    return services.canonicalize_bootstrap_address(None) is not None


@contextmanager
def this_machine_alone() -> Iterator[None]:
    """A Ray that is started meanwhile listens on the loopback interface, and its token is kept to this user.

    For Ray 2.60: only the setting that it has for Windows and macOS makes it choose the loopback address as that of a node, and
    it is read when Ray is imported. tests/cluster/test_ray_access.py notices. What this process starts later, a cluster of
    several nodes maybe, does not inherit it.
    """
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _make_private_token(Path.home() / TOKEN)
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, is_enabled = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # of the processes that Ray starts, and here
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_private_token(path: Path) -> None:
    """Ray itself writes its token for everybody to read, where there is none yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        status = path.stat()
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
