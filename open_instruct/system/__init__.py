"""Helpers for processes, signals, sockets, threads and secrets on this machine."""
