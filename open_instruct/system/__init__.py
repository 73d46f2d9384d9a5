"""Processes, signals, sockets, threads and secrets on this machine."""
