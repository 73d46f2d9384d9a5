"""`/metrics` for Prometheus: the numbers of the newest rows, under their names in `metric_names.py`.

`scores` is `open_instruct_scores`, and `time/weight_sync` is `open_instruct_time_weight_sync`: every character that Prometheus
refuses becomes `_`. The text of the table is the help of each.
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.report.isolation import Isolation
from open_instruct.report.metric_names import find
from open_instruct.report.metric_table import LAST_ROW, PREFIX, RUN_INFO
from open_instruct.report.metrics_file import STEP_KEY, to_json_value
from open_instruct.report.tracker import numbers_of

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)


def exposed_name(key: str) -> str:
    """The name of a metric in Prometheus."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", key)


class MetricsEndpoint:
    """A tracker that holds the newest value of each metric, and answers `GET /metrics` with them until it is finished.

    Args:
        port: 0 takes one that is free; `port` says which.
        about: labels of `open_instruct_run_info`.

    Raises:
        OSError: the port is taken, or the host is none of this machine.
    """

    def __init__(self, host: str, port: int, about: Mapping[str, str]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._about = dict(about)
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(port, host, registry)
        self.port: int = self._server.server_address[1]

    def collect(self) -> Iterator["Metric"]:
        """What `prometheus_client` asks for at each `GET`."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily(exposed_name(RUN_INFO.name).removesuffix("_info"), RUN_INFO.meaning, value=self._about)
        with self._lock:
            values = dict(self._values)
        families: dict[str, Metric] = {}
        for key, value in values.items():
            metric = find(key)
            meaning = metric.meaning if metric is not None else ""
            families.setdefault(exposed_name(key), GaugeMetricFamily(exposed_name(key), meaning, value=value))
        yield from families.values()

    def describe(self) -> list["Metric"]:
        """None are known before the first row."""
        return []

    def started(self, after_step: int) -> None:
        pass

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = numbers_of(to_json_value(dict(metrics)))
        with self._lock:
            self._values |= numbers | {STEP_KEY: float(step), LAST_ROW.name: time.time()}

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        pass

    def alert(self, title: str, text: str, step: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        self._server.shutdown()
        self._server.server_close()


def open_endpoint(args: GRPOConfig) -> list[MetricsEndpoint]:
    """The endpoint of a run with `--metrics_port`. If it cannot be opened, the run goes on without it."""
    if args.metrics_port is None:
        return []
    about = {"run": args.run_title, "model": args.model_name_or_path, "output_dir": args.output_dir}
    with Isolation("the endpoint for Prometheus"):
        endpoint = MetricsEndpoint(args.metrics_host, args.metrics_port, about)
        logger.info("metrics for Prometheus: http://%s:%d/metrics", args.metrics_host, endpoint.port)
        return [endpoint]
    return []


def metrics_port_is_free(args: GRPOConfig) -> list[str]:
    """What is wrong with the address in `--metrics_host` and `--metrics_port`."""
    if args.metrics_port is None:
        return []
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            args.metrics_host, args.metrics_port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        options = shown(args, "metrics_port", "metrics_host")
        return [
            f"{options}: cannot listen there ({error.strerror}). Give another port, 0 for one that is free, or another host."
        ]
    return []
