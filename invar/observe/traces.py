"""OpenTelemetry traces of requests, by the GenAI semantic conventions. Imported when asked for.

One span of kind SERVER a request, made when it has ended, and below it the spans queue, prefill and
decode. A caller's ``traceparent`` is its parent and decides whether it is recorded; without one
``OTEL_TRACES_SAMPLER`` does. Names: https://github.com/open-telemetry/semantic-conventions-genai
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from invar.observe.build import version_text
from invar.observe.requests import RequestRecord

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
TRACES_PATH = "/v1/traces"  # of a collector that was named without a path
PHASES = ("queue", "prefill", "decode")
LARGEST_INT = (1 << 63) - 1  # of an attribute


class Traces:
    """Spans of one HTTP process; they are sent from a thread."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        """``model``: the name that is served."""
        self._model = model
        resource = Resource.create({"service.name": "invar", "service.version": version_text()})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("invar", version_text())
        self._parents = TraceContextTextMapPropagator()

    def end(self, record: RequestRecord) -> None:
        """A request has ended; its record learns the id of its trace."""
        assert record.ended is not None
        span = self._tracer.start_span(
            f"{record.operation} {self._model}" if record.operation else name_of(record),
            self._parents.extract(record.trace_headers),
            SpanKind.SERVER,
            start_time=nanoseconds(record, record.began),
        )
        context = span.get_span_context()
        record.trace_id = format_trace_id(context.trace_id)
        if span.is_recording():
            span.set_attributes(attributes_of(record, self._model))
            if record.status >= 500 or "error" in record.finish_reasons:
                span.set_status(Status(StatusCode.ERROR, record.error))
            parent = set_span_in_context(span)
            moments = (record.began, record.first_scheduled, record.first_token, record.last_token)
            for name, begin, end in zip(PHASES, moments, moments[1:], strict=False):
                if begin is not None and end is not None:
                    start_time = nanoseconds(record, begin)
                    phase = self._tracer.start_span(name, parent, start_time=start_time)
                    phase.end(nanoseconds(record, max(begin, end)))
        span.end(nanoseconds(record, record.ended))

    def close(self) -> None:
        """Sends what waits, for some seconds."""
        self._provider.shutdown()


def otlp_exporter(url: str) -> SpanExporter:
    return OTLPSpanExporter(url)


def otlp_url(endpoint: str) -> str:
    """Where spans go. Raises ValueError for an endpoint that is none, or another protocol."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(
            f"--otlp-traces-endpoint {endpoint[:100]}: not a URL such as "
            f"http://localhost:4318{TRACES_PATH} (OTLP over HTTP; port 4317 speaks gRPC)"
        )
    for variable in PROTOCOL_VARIABLES:
        if os.environ.get(variable, "http/protobuf") != "http/protobuf":
            raise ValueError(f"{variable}: traces are sent as http/protobuf only")
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def name_of(record: RequestRecord) -> str:
    return f"{record.method} {record.route}"


def nanoseconds(record: RequestRecord, moment: float) -> int:
    """Of the wall clock, at a moment of the monotonic one."""
    return int((record.began_at + moment - record.began) * 1e9)


def attributes_of(record: RequestRecord, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "invar.request_id": record.id,
        "error.type": record.error,
    }
    if record.operation is not None:
        attributes |= {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": "invar",
            "gen_ai.request.model": model,
        }
    if record.parameters is not None:
        attributes |= parameters_of(record)
        attributes |= {
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": sorted(record.finish_reasons),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        }
        if record.first_token is not None:
            wait_s = record.first_token - record.began
            attributes["gen_ai.response.time_to_first_chunk"] = wait_s
    return {name: value for name, value in attributes.items() if value is not None}


def parameters_of(record: RequestRecord) -> dict[str, Any]:
    assert record.parameters is not None
    sampling = record.parameters.sampling
    return {
        "gen_ai.request.stream": record.stream,
        "gen_ai.request.choice.count": record.choices if record.choices > 1 else None,
        "gen_ai.request.max_tokens": record.parameters.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed if sampling.seed <= LARGEST_INT else None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
