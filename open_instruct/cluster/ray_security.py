"""Limits access to the Ray that a run starts to this machine, with a token that no other user can read.

Without a token, anybody who reaches a Ray cluster can run any code on it.
"""

import logging
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
ABOUT_TOKENS = "ray._private.authentication.authentication_token_setup"
"""Ray's logger that warns in each run that the token is used, which is how it shall be."""


class NoSuchCluster(ValueError):
    """The Ray cluster that the run should join cannot be reached. The message says what to do."""


def cluster_to_join() -> str | None:
    """Address of the cluster that `ray.init` would join: the cluster of RAY_ADDRESS, or a cluster that `ray start` has started
    here. None if Ray would start a new cluster.

    Raises:
        NoSuchCluster: the address is malformed, or no cluster answers there. Ray itself would try for many minutes.
    """
    cure = "Start that cluster, or set RAY_ADDRESS=local for a Ray of this run's own."
    try:
        address = services.canonicalize_bootstrap_address(None)
    except (ValueError, OSError) as error:
        named = os.environ.get("RAY_ADDRESS")
        raise NoSuchCluster(f"RAY_ADDRESS {named}: {error} An address is written host:port. {cure}") from error
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise NoSuchCluster(
            f"no Ray cluster answers at {address} ({error}), which RAY_ADDRESS or an earlier `ray start` on this machine names. "
            f"{cure}"
        ) from error
    return address


@contextmanager
def this_machine_alone() -> Iterator[None]:
    """A Ray that is started in the block listens only on the loopback interface, only this user can read its token, and Ray does
    not warn that there is one.

    For Ray 2.60: only the setting that Ray has for Windows and macOS makes it choose the loopback address as the address of a
    node, and Ray reads this setting when it is imported. tests/cluster/test_ray_security.py notices. The setting ends with the
    block, so that programs that this process starts later, perhaps a cluster of several nodes, do not inherit it.
    """
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _make_private_token(Path.home() / TOKEN)
    ray_about_tokens = logging.getLogger(ABOUT_TOKENS)
    level = ray_about_tokens.level
    ray_about_tokens.setLevel(logging.ERROR)
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, is_enabled = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for processes that Ray starts, and here
    try:
        yield
    finally:
        ray_about_tokens.setLevel(level)
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_private_token(path: Path) -> None:
    """Make sure that a token exists and only this user can read it. Ray itself would make a token that every user can read."""
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
