"""`/metrics`, read over HTTP as Prometheus reads it, with the parser of its own library."""

import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.report.histogram import histogram
from open_instruct.report.metric_names import find
from open_instruct.report.metric_table import SECTIONS
from open_instruct.report.metrics_endpoint import (
    MetricsEndpoint,
    exposed_name,
    metrics_port_is_free,
    open_endpoint,
)

LOOPBACK = "127.0.0.1"


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(LOOPBACK, 0, {"run": "grpo__42", "model": 'a "model"'})
    yield endpoint
    endpoint.finish()


def get(port: int) -> dict[str, float]:
    """The samples of a `GET`, by name. Every family is a gauge with one sample."""
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} == {"gauge"}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_newest_value_of_each_metric_is_there(endpoint: MetricsEndpoint) -> None:
    endpoint.log({"training_step": 1, "scores": 0.25, "eval/scores": 0.5, "is_paused": False}, 1)
    endpoint.log({"training_step": 2, "scores": 0.75, "kl": float("nan"), "val/advantages_hist": histogram([1.0])}, 2)
    samples = get(endpoint.port)
    assert time.time() - samples.pop("open_instruct_last_row_timestamp_seconds") < 60
    assert samples == {
        "open_instruct_run_info": 1,
        "open_instruct_training_step": 2,
        "open_instruct_scores": 0.75,
        "open_instruct_eval_scores": 0.5,
        "open_instruct_is_paused": 0,
    }


def test_help_is_what_the_table_says_and_labels_name_the_run(endpoint: MetricsEndpoint) -> None:
    endpoint.log({"time/weight_sync": 0.5}, 1)
    with urllib.request.urlopen(f"http://{LOOPBACK}:{endpoint.port}/metrics", timeout=20) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    metric = find("time/weight_sync")
    assert metric is not None
    assert families["open_instruct_time_weight_sync"].documentation == metric.meaning
    assert families["open_instruct_run_info"].samples[0].labels == {"run": "grpo__42", "model": 'a "model"'}


def test_before_the_first_row_the_run_itself_is_there(endpoint: MetricsEndpoint) -> None:
    assert get(endpoint.port) == {"open_instruct_run_info": 1}


def test_when_the_run_is_over_nobody_answers() -> None:
    endpoint = MetricsEndpoint(LOOPBACK, 0, {})
    endpoint.finish()
    with pytest.raises(urllib.error.URLError):
        get(endpoint.port)


def test_by_default_other_machines_are_not_answered() -> None:
    (endpoint,) = open_endpoint(GRPOConfig(model_name_or_path="m", metrics_port=0))
    try:
        assert endpoint._server.server_address[0] == LOOPBACK
    finally:
        endpoint.finish()
    assert open_endpoint(GRPOConfig(model_name_or_path="m")) == []


def test_a_port_that_is_taken_is_a_mistake_before_the_run_and_a_warning_in_it(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        args = GRPOConfig(model_name_or_path="m", metrics_port=server.getsockname()[1])
        assert metrics_port_is_free(args) == [
            f"--metrics_port {args.metrics_port} --metrics_host 127.0.0.1: cannot listen there (Address already in use). "
            "Give another port, 0 for one that is free, or another host."
        ]
        assert open_endpoint(args) == []
    assert metrics_port_is_free(args) == []
    assert "the endpoint for Prometheus failed; the run goes on without it" in caplog.text


def test_two_metrics_have_one_name_only_where_they_are_the_same() -> None:
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics if "<" not in metric.name]
    counts = Counter(map(exposed_name, names))
    assert {name for name, count in counts.items() if count > 1} == set()
