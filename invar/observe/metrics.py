"""What one HTTP process counts, and what its engine reports. The names are in `catalogue`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from invar.observe.catalogue import METRICS, MODEL, Kind, Spec
from invar.observe.exposition import BOOT, OF_BOOTS, Exposition
from invar.observe.requests import OTHER, RequestRecord

MAX_NAMES = 256  # distinct values of a label that clients can choose; what comes later is "other"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
# Asked by machines every few seconds: not among the requests to the API.
QUIET_ROUTES = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})
# Values of the label behind those of the model that will come, or are asked for.
EXPECTED = {
    "vllm:request_success": ("stop", "length", "abort", "error"),
    "vllm:admission_rejections": ("max_num_queued_reqs", "max_num_queued_tokens"),
    "vllm:engine_sleep_state": SLEEP_STATES,
}


class Metrics:
    """All metrics of one served model; every method but `render` is called on the event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = (model_name, "0")
        self._specs = {spec.name: spec for spec in METRICS}
        self._metrics: dict[str, Any] = {spec.name: made(spec, self.registry) for spec in METRICS}
        self._children: dict[tuple[str, ...], Any] = {}
        self._names: dict[str, set[str]] = {}
        # Every series is there from the start: a rate needs a value before the first change. None
        # is set: what a process that has just come has must not pass for the latest values.
        self._boot, self._reported = "", self._series_of("")
        self._shown: Mapping[str, float] = {}  # of the last report
        for spec in METRICS:
            if set(spec.labels) <= set(MODEL) and spec.kind not in OF_BOOTS:
                self._child(spec.name)
        for name, values in EXPECTED.items():
            for value in values:
                self._child(name, value)
        self._exposition = Exposition(self.registry)

    def _child(self, name: str, *values: str) -> Any:
        """The series of a metric; ``values`` of the labels behind those of the model."""
        key = (name, *values)
        found = self._children.get(key)
        if found is None:
            spec, metric = self._specs[name], self._metrics[name]
            labels = len(spec.labels) - len(values)
            found = metric.labels(*self._model[:labels], *values) if spec.labels else metric
            self._children[key] = found
        return found

    def render(self) -> bytes:
        """Prometheus text format 0.0.4, for all HTTP processes; takes milliseconds."""
        return self._exposition.render()

    # ------------------------------------------------------------ the engine

    def observe_report(self, stats: Mapping[str, float]) -> None:
        """Takes the engine's gauges and running totals; none: nothing new."""
        if stats:
            boot = f"{stats.get('started', 0.0):.6f}"
            self._show_report({**stats, "starts": 1.0}, boot)

    def _show_report(self, stats: Mapping[str, float], boot: str) -> None:
        if boot != self._boot:
            self._boot, self._reported, self._shown = boot, self._series_of(boot), {}
        for stat, series in self._reported:
            value = stats.get(stat, 0.0)
            if self._shown.get(stat) != value:
                series.set(value)
        self._shown = stats

    def _series_of(self, boot: str) -> list[tuple[str, Any]]:
        """What the report of an engine started then goes to: (name in the report, series)."""
        series = []
        for spec in METRICS:
            of_boot = (boot,) if spec.kind in OF_BOOTS else ()
            for values, stat in spec.stats.items():
                series.append(
                    (stat, self._metrics[spec.name].labels(*self._model, *values, *of_boot))
                )
        return series

    def show_ready(self, ready: bool) -> None:
        """Whether the engine takes requests now."""
        for state in SLEEP_STATES:
            awake = ready and state == "awake"
            self._child("vllm:engine_sleep_state", state).set(float(awake))

    def show_cache(self, *, block_size: int, blocks: int, dtype: str, prefix_caching: bool) -> None:
        labels = (str(block_size), str(blocks), dtype, str(prefix_caching))
        self._child("vllm:cache_config_info", *labels).set(1)

    def show_queue_limits(self, requests: int | None, tokens: int | None) -> None:
        for of, limit in (("requests", requests), ("tokens", tokens)):
            if limit is not None:
                self._child("invar:queue_limit", of).set(limit)

    # ------------------------------------------------------------ requests

    def observe_call(self, choices: int) -> None:
        """A call comes, with so many choices a prompt."""
        self._child("vllm:request_params_n").observe(choices)

    def observe_longest(self, output_tokens: int) -> None:
        """A call has ended whose longest choice has so many tokens."""
        self._child("vllm:request_max_num_generation_tokens").observe(output_tokens)

    def observe_first_token(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._child("vllm:time_to_first_token_seconds").observe(seconds)
        self._child("vllm:prompt_tokens").inc(prompt_tokens)
        self._child("vllm:prompt_tokens_cached").inc(cached_tokens)

    def observe_tokens(self, tokens: int) -> None:
        self._child("vllm:generation_tokens").inc(tokens)

    def observe_gap(self, seconds: float, tokens: int) -> None:
        """So many ``tokens`` came ``seconds`` after the one before."""
        self._child("vllm:inter_token_latency_seconds").observe_many(seconds, tokens)

    def observe_end(
        self,
        *,
        reason: str,
        arrival: float,
        first_scheduled: float | None,
        first_token: float | None,
        last_token: float | None,
        end: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        max_tokens: int,
        preemptions: int,
    ) -> None:
        """An engine request has ended. Times are monotonic seconds; None: it never came to that."""
        self._child("vllm:request_success", reason).inc()
        self._observe("vllm:e2e_request_latency_seconds", end - arrival)
        self._observe("vllm:request_prompt_tokens", prompt_tokens)
        self._observe("vllm:request_generation_tokens", output_tokens)
        self._observe("vllm:request_params_max_tokens", max_tokens)
        self._observe("vllm:request_num_preemptions", preemptions)
        if first_scheduled is not None:
            self._observe("vllm:request_queue_time_seconds", first_scheduled - arrival)
        if first_token is None or last_token is None:
            return
        scheduled = arrival if first_scheduled is None else first_scheduled
        self._observe("vllm:request_prefill_time_seconds", first_token - scheduled)
        self._observe("vllm:request_decode_time_seconds", last_token - first_token)
        self._observe("vllm:request_inference_time_seconds", last_token - scheduled)
        self._observe("vllm:request_prefill_kv_computed_tokens", prompt_tokens - cached_tokens)
        if output_tokens > 1:
            mean = (last_token - first_token) / (output_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", mean)

    def _observe(self, name: str, value: float) -> None:
        # Clocks of two threads may disagree by a hair.
        self._child(name).observe(max(0.0, value))

    # ------------------------------------------------------------ HTTP

    def observe_request(self, record: RequestRecord) -> None:
        """An HTTP request has ended."""
        method = record.method if record.method in METHODS else OTHER
        status = record.status
        self._child("invar:http_requests", record.route, str(status)).inc()
        if record.error is not None:
            self._child("invar:http_errors", self._bounded("code", record.error)).inc()
        if record.left:
            self._child("invar:client_disconnects").inc()
        if record.route in QUIET_ROUTES:
            return
        group = f"{status // 100}xx"
        self._child("http_requests", record.route, method, group).inc()
        duration = self._child("http_request_duration_seconds", record.route, method)
        duration.observe((record.ended or record.began) - record.began)

    def count_rejection(self, reason: str) -> None:
        """A cap of the queue was reached: max_num_queued_reqs or max_num_queued_tokens."""
        self._child("vllm:admission_rejections", reason).inc()

    def count_dropped_line(self) -> None:
        """May be called from any thread."""
        self._child("invar:access_log_dropped").inc()

    def count_unknown_field(self, name: str) -> None:
        self._child("invar:unknown_request_fields", self._bounded("field", name)).inc()

    def _bounded(self, label: str, value: str) -> str:
        """The value, or "other" once there are so many that a client must be making them up."""
        seen = self._names.setdefault(label, set())
        if value not in seen:
            if len(seen) >= MAX_NAMES:
                return OTHER
            seen.add(value)
        return value


class CountedHistogram(Histogram):
    """One that takes many equal observations for the price of one."""

    def observe_many(self, amount: float, count: int) -> None:
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


def made(spec: Spec, registry: CollectorRegistry) -> Any:
    match spec.kind:
        case Kind.COUNTER:
            return Counter(spec.name, spec.text, spec.labels, registry=registry)
        case Kind.HISTOGRAM:
            return CountedHistogram(
                spec.name, spec.text, spec.labels, registry=registry, buckets=spec.buckets
            )
        case Kind.ENGINE_TOTAL | Kind.ENGINE_HISTOGRAM:
            # Every process hears of the same totals: the furthest one is right.
            labels = (*spec.labels, BOOT)
            return Gauge(spec.name, spec.text, labels, registry=registry, multiprocess_mode="max")
    return Gauge(
        spec.name, spec.text, spec.labels, registry=registry, multiprocess_mode="mostrecent"
    )
