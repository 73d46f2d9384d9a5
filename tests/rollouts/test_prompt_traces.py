"""The life of prompts, as real receivers of OTLP get it, over gRPC and over HTTP."""

import socket
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, attributes_of, grpc_collector, http_collector

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import GenerationResult, TokenStatistics
from open_instruct.report.metric_table import ATTRIBUTES, SPANS
from open_instruct.report.otlp import SpanSender
from open_instruct.rollouts.prompt_ledger import IssuedPrompt
from open_instruct.rollouts.prompt_traces import PromptTraces, open_traces

START = 1_700_000_000.0
"""Unix time at which the runs of these tests begin."""


@pytest.fixture(params=[grpc_collector, http_collector])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as collector:
        yield collector


class Clock:
    """Unix time, as the test sets it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def prompt(number: int = 17, *, num_issues: int = 1, version: int = 3) -> IssuedPrompt:
    return IssuedPrompt(f"train-{number}", number, version, num_issues=num_issues)


def result_of(number: int = 17, *, engine: int = 1, error: str = "") -> GenerationResult:
    """Admitted a second after `START`, and generated in four."""
    statistics = TokenStatistics(20, 100, 4.0, START + 1, tool_time=0.5)
    return GenerationResult([], number, f"train-{number}", 3, engine, statistics, error=error)


def seconds_of(span: Span) -> tuple[float, float]:
    """Beginning and end, since `START`."""
    return round(span.start_time_unix_nano / 1e9 - START, 3), round(span.end_time_unix_nano / 1e9 - START, 3)


def traces_to(collector: Collector, clock: Clock) -> PromptTraces:
    return PromptTraces(SpanSender(collector.endpoint, {"run": "grpo__42"}), "run-id", clock=clock)


def live(traces: PromptTraces, clock: Clock) -> None:
    """The prompt is issued at 0 s, admitted at 1, generated at 5, scored at 7 (which took 1.5), taken at 8, trained at 12."""
    traces.issued(prompt())
    clock.now = START + 7
    traces.scored(result_of(), 1.5)
    clock.now = START + 8
    traces.took(4, result_of(), prompt(), "consumed")
    clock.now = START + 12


def test_a_consumed_prompt_has_a_span_for_each_part_of_its_life(collector: Collector) -> None:
    clock = Clock()
    traces = traces_to(collector, clock)
    live(traces, clock)
    traces.trained(4)
    traces.close()
    assert {span.name: seconds_of(span) for span in collector.spans} == {
        "prompt": (0, 12),
        "queue": (0, 1),
        "generation": (1, 5),
        "verification": (5.5, 7),
        "batch": (7, 12),
    }
    (root,) = collector.named("prompt")
    assert {span.parent_span_id for span in collector.spans if span is not root} == {root.span_id}
    assert root.parent_span_id == b""
    shared = {"prompt.id": "train-17", "prompt.attempt": 0, "prompt.version": 3, "prompt.engine": 1}
    assert attributes_of(root) == shared | {"prompt.outcome": "consumed", "prompt.step": 4}
    (generation,) = collector.named("generation")
    assert attributes_of(generation) == shared | {
        "prompt.version.oldest": 3,
        "prompt.version.newest": 3,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 100,
        "prompt.tool_s": 0.5,
    }
    (batch,) = collector.named("batch")
    assert [(event.name, event.time_unix_nano / 1e9 - START) for event in batch.events] == [("taken", 8)]
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert (collector.resource["service.name"], collector.resource["run"]) == ("open_instruct", "grpo__42")


def test_all_names_are_of_the_table_and_all_of_the_table_are_used(collector: Collector) -> None:
    clock = Clock()
    traces = traces_to(collector, clock)
    live(traces, clock)
    traces.trained(4)
    traces.issued(prompt(18))
    traces.given_up(result_of(18, error="it took too long"))
    traces.close()
    assert {span.name for span in collector.spans} == {span.name for span in SPANS}
    names = {name for span in collector.spans for name in attributes_of(span)}
    assert names == {attribute.name for attribute in ATTRIBUTES}


def test_a_dropped_prompt_says_why(collector: Collector) -> None:
    clock = Clock()
    traces = traces_to(collector, clock)
    traces.issued(prompt())
    traces.scored(result_of(), 0.1)
    traces.took(4, result_of(), prompt(), "zero_std")
    traces.trained(4)  # of the others of the step
    traces.close()
    (root,) = collector.named("prompt")
    assert attributes_of(root)["prompt.outcome"] == "zero_std"


def test_attempts_at_a_prompt_are_one_trace(collector: Collector) -> None:
    """Lost with an engine, given up by another, discarded as too old; the fourth is open when the run ends."""
    clock = Clock()
    traces = traces_to(collector, clock)
    traces.issued(prompt())
    traces.lost(["train-17", "train-99"])
    traces.issued(prompt(num_issues=2))
    traces.given_up(result_of(error="it took too long"))
    traces.issued(prompt(num_issues=3))
    traces.scored(result_of(), 0.1)
    traces.took(4, result_of(), prompt(num_issues=3), "too_old")
    traces.issued(prompt(num_issues=4))
    traces.close()
    roots = {attributes_of(span)["prompt.attempt"]: span for span in collector.named("prompt")}
    assert {number: attributes_of(root)["prompt.outcome"] for number, root in roots.items()} == {
        0: "lost",
        1: "given_up",
        2: "too_old",
        3: "run_ended",
    }
    assert len({span.trace_id for span in collector.spans}) == 1
    assert [roots[number].status.message for number in (0, 1, 2)] == ["its engine died", "it took too long", ""]


def test_another_prompt_is_another_trace_and_the_same_one_after_a_resume(collector: Collector) -> None:
    for _ in range(2):  # two starts of the run
        traces = traces_to(collector, Clock())
        traces.issued(prompt(1))
        traces.issued(prompt(2))
        traces.close()
    assert len(collector.named("prompt")) == 4
    assert len({span.trace_id for span in collector.spans}) == 2


def test_a_prompt_that_an_earlier_start_issued_begins_with_its_generation(collector: Collector) -> None:
    clock = Clock()
    traces = traces_to(collector, clock)
    clock.now = START + 8
    traces.took(4, result_of(), prompt(), "consumed")
    traces.trained(4)
    traces.close()
    assert {span.name: seconds_of(span) for span in collector.spans} == {"prompt": (1, 8), "generation": (1, 5)}


@pytest.mark.parametrize("path", ["", "/v1/traces"])
def test_a_receiver_that_is_away_costs_one_warning_and_little_time(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free once the block ends
    traces = open_traces(
        GRPOConfig(model_name_or_path="m", otlp_traces_endpoint=f"http://127.0.0.1:{port}{path}", output_dir="out")
    )
    assert traces is not None
    began = time.monotonic()
    for number in range(100):
        traces.issued(prompt(number))
    assert time.monotonic() - began < 5
    traces.close()
    while not caplog.records and time.monotonic() - began < 60:
        time.sleep(0.05)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"http://127.0.0.1:{port}{path} takes no traces; the run goes on without them: ")


def test_without_the_option_nothing_is_followed() -> None:
    assert open_traces(GRPOConfig(model_name_or_path="m")) is None


@pytest.mark.parametrize("address", ["localhost:4317", "http://", "http://host:70000", "ftp://host:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    from open_instruct.config.path_checks import the_receiver_of_traces_has_an_address

    args = GRPOConfig(model_name_or_path="m", otlp_traces_endpoint=address)
    assert list(the_receiver_of_traces_has_an_address(args)) == [
        f"--otlp_traces_endpoint {address}: no address. Give one such as http://localhost:4317, or "
        "http://localhost:4318/v1/traces."
    ]
