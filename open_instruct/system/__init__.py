"""Processes, signals, sockets and secrets of this machine."""
