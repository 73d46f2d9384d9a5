"""Limits who can reach the Ray that a run starts: this machine alone, with a token that no other user can read.

Without a token, anybody who reaches a Ray cluster can run any code on it.
"""

import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants, services

ANSWER_S = 10.0
"""How long a cluster may take to accept a connection."""
TOKEN = Path(".ray") / "auth_token"
"""Where Ray itself looks for its token, under the home directory."""


def is_there_a_cluster() -> bool:
    """Whether `ray.init` would join a cluster: that of RAY_ADDRESS, or a cluster that `ray start` has started here."""
    return services.canonicalize_bootstrap_address(None) is not None


def problem_with_cluster() -> str:
    """What is wrong with the cluster that `ray.init` would join, "" if it answers. Ray itself tries for many minutes."""
    address = services.canonicalize_bootstrap_address(None) or ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        return (
            f"no Ray cluster answers at {address} ({error}), which RAY_ADDRESS or an earlier `ray start` on this machine names. "
            "Start that cluster, or set RAY_ADDRESS=local for a Ray of this run's own."
        )
    return ""


@contextmanager
def this_machine_alone() -> Iterator[None]:
    """A Ray that is started in the block listens on the loopback interface alone, and only this user can read its token.

    For Ray 2.60: only the setting that Ray has for Windows and macOS makes it choose the loopback address as the address of a
    node, and Ray reads this setting when it is imported. tests/cluster/test_ray_security.py notices. The setting ends with the
    block, so that what this process starts later, perhaps a cluster of several nodes, does not inherit it.
    """
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _make_private_token(Path.home() / TOKEN)
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, is_enabled = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for processes that Ray starts, and here
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_private_token(path: Path) -> None:
    """Make sure that there is a token and that only this user can read it. Ray itself would make a token for all to read."""
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
