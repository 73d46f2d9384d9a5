"""Sends spans to a receiver of OpenTelemetry (a collector, Jaeger, Tempo) over OTLP, with the exporters that vLLM pins.

A receiver that is away costs the spans, and one warning.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from open_instruct.report.metric_table import Attribute, Span

logger = logging.getLogger(__name__)

HTTP_PATH = "/v1/traces"
"""An address with this path is spoken to over HTTP, any other over gRPC."""
EXPORT_S = 5.0
"""Seconds that the receiver has for one batch of spans."""
MOST_WAITING = 65_536
"""Spans that wait for the receiver. Further spans are lost."""
Attributes = Mapping[Attribute, str | int | float | None]
"""Values by their entry in the table of names. None is left out."""


class _TraceIds(RandomIdGenerator):
    """Gives the next trace the id that was asked for."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class SpanSender:
    """Sends spans that are over. Not thread-safe: one thread builds them.

    Args:
        endpoint: such as `http://localhost:4317` (gRPC) or `http://localhost:4318/v1/traces` (HTTP).
        about: attributes of the whole run, such as its name.
    """

    def __init__(self, endpoint: str, about: Mapping[str, str]) -> None:
        self._ids = _TraceIds()
        # Without `shutdown_on_exit=False` the process would wait at its end for a receiver that is away.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "open_instruct", **about}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(_WarningOnce(_exporter(endpoint), endpoint), max_queue_size=MOST_WAITING)
        )
        self._tracer = self._provider.get_tracer("open_instruct")

    def root(self, span: Span, began: float, attributes: Attributes, *, trace: str) -> "OpenSpan":
        """The root of a part of the trace with this name. It began at a Unix time."""
        self._ids.trace_id = int.from_bytes(hashlib.sha256(trace.encode()).digest()[:16])
        return OpenSpan(self._tracer, span, began, attributes, Context())

    def close(self) -> None:
        """Send what is left. A receiver that is away may hold this up for half a minute."""
        self._provider.shutdown()


class OpenSpan:
    """A span that has begun."""

    def __init__(self, tracer: Tracer, span: Span, began: float, attributes: Attributes, context: Context) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(span.name, context, attributes=_values(attributes), start_time=_ns(began))

    def child(self, span: Span, began: float, ended: float, attributes: Attributes, **events: float | None) -> None:
        """A part of this span, from one Unix time to another, with events at other times (None: it did not happen)."""
        child = OpenSpan(self._tracer, span, began, attributes, set_span_in_context(self._span, Context()))
        for name, at in events.items():
            if at is not None:
                child._span.add_event(name, timestamp=_ns(at))
        child.end(max(began, ended))

    def end(self, ended: float, *, failure: str = "") -> None:
        """`failure`: why it counts as failed; "" if it does not."""
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end(_ns(ended))


class _WarningOnce(SpanExporter):
    """An exporter that warns of the first failure alone. The exporters of OpenTelemetry warn of each attempt."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._has_warned = False
        for part in ("exporter", "sdk"):
            logging.getLogger(f"opentelemetry.{part}").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
            return SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._warn("no answer")
        return result

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s takes no traces; the run goes on without them: %s", self._endpoint, why)

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    if urlsplit(endpoint).path.endswith(HTTP_PATH):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint, timeout=EXPORT_S)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)


def _values(attributes: Attributes) -> dict[str, str | int | float]:
    return {attribute.name: value for attribute, value in attributes.items() if value is not None}


def _ns(unix: float) -> int:
    return int(unix * 1e9)
