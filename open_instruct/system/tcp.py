"""Connections whose other end is gone: the kernel notices within seconds instead of hours."""

import socket
from typing import Any

PROBE_S = 5
NUM_PROBES = 3
LOST_S = PROBE_S * (NUM_PROBES + 1)
"""After which a connection breaks (OSError) whose other machine, or the network to it, is gone. A machine that is merely busy
answers: its kernel does so."""


def notice_a_lost_machine(connection: socket.socket) -> None:
    """Linux tries for two hours where nothing is on its way, and for a quarter of one where something is."""
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": NUM_PROBES}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**options, "TCP_USER_TIMEOUT": LOST_S * 1000}.items():
        if hasattr(socket, name):  # macOS has some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def make_socket(address: tuple[Any, ...]) -> socket.socket:
    """A `socket_factory` of aiohttp's connector: for one entry of `getaddrinfo`."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    notice_a_lost_machine(connection)
    return connection
