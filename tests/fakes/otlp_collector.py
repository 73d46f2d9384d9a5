"""Small receivers of OTLP in the test's own process, over gRPC and over HTTP, which keep the spans that they get."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """What a receiver got."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.endpoint = ""
        """Value of `--otlp_traces_endpoint`."""

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for part in request.resource_spans:
            self.resource |= {entry.key: entry.value.string_value for entry in part.resource.attributes}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def attributes_of(span: Span) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value") or "") for entry in span.attributes}


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


@contextlib.contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        try:
            yield collector
        finally:
            server.shutdown()
