"""Starts or joins Ray at the beginning of a run, and shuts it down at the end with everything that it has started."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import ray

from open_instruct.cluster import ray_security
from open_instruct.cluster.process_watch import (
    RayWatch,
    family_of_ray_here,
    kill_marked,
    kill_processes,
    marked,
    nothing_is_left,
    ray_processes_here,
)
from open_instruct.config.cli import fail_with
from open_instruct.run.loading_report import LoadingReport
from open_instruct.system.signals import Signals

logger = logging.getLogger(__name__)

RAY_SHUTDOWN_S = 0.5
"""How long Ray may take to end its processes before they are killed. The run's own processes have ended by then. Ray's raylet
would take several seconds more, and nothing needs to wait for it."""


@contextmanager
def ray_cluster(stopped_timeout_s: float = 12.0) -> Iterator[Signals]:
    """Ray on this machine, or the cluster that RAY_ADDRESS names. At the end Ray is shut down with everything it started here.

    If Ray's own processes on this machine end, or are stopped for `stopped_timeout_s`, this process ends too (`RayWatch`).

    SIGTERM, SIGINT and SIGHUP are blocked while Ray starts its processes. The processes inherit the block, so a signal to the
    whole process group reaches only the driver, which then ends the other processes in order. Ray's own signal handler is
    replaced before the signals are unblocked.
    """
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signals = Signals()
    try:
        is_own = ray_security.cluster_to_join() is None
    except ray_security.NoSuchCluster as error:
        fail_with([str(error)])
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with marked() as mark, LoadingReport("Ray"):
            _enter_ray(mark, is_own=is_own)
        signals.install()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    ray_watch = RayWatch(ray_processes_here(), mark, stopped_timeout_s)
    ray_watch.start()
    with nothing_is_left(mark) if is_own else nullcontext():
        try:
            yield signals
        finally:
            ray_watch.stop()
            _leave_ray(mark, is_own=is_own)
            signals.remove()


def _enter_ray(mark: str, *, is_own: bool) -> None:
    """Join the existing cluster, or start one. Starting is tried twice, because Ray's limit of 30 s is short for a busy
    machine."""
    for is_last in (False, True):
        try:
            with ray_security.this_machine_alone() if is_own else nullcontext():
                ray.init(
                    address="local" if is_own else os.environ.get("RAY_ADDRESS"),
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            return
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray has not started in time (is this machine busy?): trying once more")
            ray.shutdown()
            kill_marked(mark)


def _leave_ray(mark: str, *, is_own: bool) -> None:
    """Shut Ray down, by force if necessary, because a stopped process (SIGSTOP) does not end when asked."""
    family = family_of_ray_here() if is_own else []
    force = threading.Timer(RAY_SHUTDOWN_S, kill_marked, [mark])
    force.daemon = True
    force.start()
    ray.shutdown()
    force.cancel()
    kill_marked(mark)
    kill_processes(family)
