"""Traces, at a collector of OTLP of our own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from api.scripted import RunningServer, endless, running, says

from invar.cli.http_side import http_options
from invar.cli.serve import parser
from invar.observe.traces import Traces, otlp_exporter, otlp_url

from .collector import Collector, collecting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextmanager
def traced(**options: Any) -> Iterator[tuple[RunningServer, Collector]]:
    """The spans are there after the block."""
    with collecting() as collector, running(**options) as server:
        server.server.traces = Traces(otlp_exporter(otlp_url(collector.url)), "scripted")
        yield server, collector


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


def test_a_call_is_a_span_below_the_callers() -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    with traced(script=says("Hello", " world")) as (server, collector):
        server.http.headers["traceparent"] = parent
        server.chat(temperature=0.5, seed=2**64 - 1, max_tokens=9)
        server.http.get("/health")
    assert collector.paths == {"/v1/traces"}
    span = collector.named("chat scripted")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.kind == span.SPAN_KIND_SERVER
    found = attributes(span)
    reasons = found.pop("gen_ai.response.finish_reasons")
    assert [value.string_value for value in reasons.values] == ["stop"]
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 10
    assert len(found.pop("invar.request_id")) == 32
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "invar",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }
    phases = [collector.named(name) for name in ("queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {span.span_id}
    times = [span.start_time_unix_nano]
    for phase in phases:
        times += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    assert times == sorted(times)
    assert times[-1] <= span.end_time_unix_nano
    assert len(collector.spans) == 4  # nobody asks how often a server was alive


def test_errors_and_what_the_caller_does_not_want() -> None:
    with traced(script=endless()) as (server, collector):
        server.chat(temperature=9)
        server.http.get("/nowhere")
        server.chat(max_tokens=2, **{"user": "person@example.test"})
        server.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"  # not sampled
        server.chat(max_tokens=2)
    wrong, other, right = [span for span in collector.spans if span.kind == span.SPAN_KIND_SERVER]
    assert attributes(wrong)["error.type"] == "invalid_request_error"
    assert wrong.status.code == wrong.status.STATUS_CODE_UNSET  # the client's, by convention
    assert other.name == "GET other"
    assert not right.parent_span_id
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}
    assert not [span for span in collector.spans if b"person" in span.SerializeToString()]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    """Said before the model is read."""
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint .*localhost:4318/v1/traces"):
        http_options(parser().parse_args(["m", "--otlp-traces-endpoint", endpoint]))


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="http/protobuf only"):
        otlp_url("http://localhost:4318")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "invar.observe.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ValueError, match=r"pip install 'invar-llm\[otel\]'"):
        http_options(parser().parse_args(["m", "--otlp-traces-endpoint", "http://localhost:4318"]))


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        # FastAPI imports the API, which does nothing by itself, where it is there.
        "import sys, invar.api.app, invar.cli.serve, invar.cli.listening\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
