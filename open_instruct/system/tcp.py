"""Lets the kernel notice within seconds, instead of hours, that the other end of a connection is gone."""

import socket
from typing import Any

PROBE_S = 5
NUM_PROBES = 3
LOST_S = PROBE_S * (NUM_PROBES + 1)
"""Seconds after which a connection breaks (OSError) if the other machine or the network to it is gone. A busy machine is not
taken for lost, because its kernel still answers."""


def notice_a_lost_machine(connection: socket.socket) -> None:
    """Let the connection break after `LOST_S` if the other machine is lost. By default Linux tries for two hours on an idle
    connection, and for a quarter of an hour if data is being sent."""
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": NUM_PROBES}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**options, "TCP_USER_TIMEOUT": LOST_S * 1000}.items():
        if hasattr(socket, name):  # macOS has only some of these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def make_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for one entry of `getaddrinfo`; the `socket_factory` of aiohttp's connector."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    notice_a_lost_machine(connection)
    return connection
