"""Chooses the network interface that collectives use on this node."""

import os

import psutil
import ray

OF_GLOO, OF_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name the network interface for gloo and for NCCL."""


def network_interface(*variables: str) -> dict[str, str]:
    """A value for each of these variables: what the user has set, else the interface with this node's address in the cluster.

    Without these variables gloo takes the interface of the host's name, and NCCL the first interface that it finds.
    """
    address = ray.util.get_node_ip_address()
    names = [
        name for name, addresses in psutil.net_if_addrs().items() if address in (entry.address for entry in addresses)
    ]
    return {variable: os.environ.get(variable, names[0]) for variable in variables} if names else {}
