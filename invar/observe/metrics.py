"""Prometheus metrics under vLLM's names, so that existing dashboards light up.

Names, kinds and labels: vLLM 0.33 `vllm/v1/metrics/loggers.py`. Two names that vLLM has dropped but
that dashboards still ask for are served as aliases of today's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Bucket bounds of vLLM, which its dashboards' quantiles are tuned to (seconds).
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

# vLLM's name → the engine's own (`EngineStats`). What vLLM does not count has a prefix of ours.
GAUGES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prefix_cache_tokens": "cache_tokens",
    "kv_cache_unfilled_perc": "kv_unfilled",
    "kv_cache_shared_bytes": "kv_saved_by_sharing",
    "kv_cache_window_saved_bytes": "kv_saved_by_windows",
    "kv_store_bytes": "store_bytes",
}
TOTALS = {
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "cache_queries",
    "prefix_cache_hits": "cache_hits",
    "prefix_cache_evicted_tokens": "cache_evictions",
    "external_prefix_cache_hits": "store_tokens",
    "kv_store_pages_written": "store_pages_written",
    "kv_store_pages_read": "store_pages_read",
}


class Metrics:
    """All metrics of one served model; every method is called on the event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauges = {
            "num_requests_running": self._gauge("num_requests_running", "Requests in the batch."),
            "num_requests_waiting": self._gauge("num_requests_waiting", "Requests in the queue."),
            "kv_cache_usage_perc": self._gauge(
                "kv_cache_usage_perc", "KV pages in use, 0 to 1.", alias="gpu_cache_usage_perc"
            ),
            "kv_cache_unfilled_perc": self._gauge(
                "kv_cache_unfilled_perc",
                "Of the KV pages in use, the share that holds no token, 0 to 1.",
                prefix="invar",
            ),
            "kv_cache_shared_bytes": self._gauge(
                "kv_cache_shared_bytes",
                "KV bytes that requests would hold more did they not share pages.",
                prefix="invar",
            ),
            "kv_cache_window_saved_bytes": self._gauge(
                "kv_cache_window_saved_bytes",
                "KV bytes that would be in use did layers with a window keep all tokens.",
                prefix="invar",
            ),
            "prefix_cache_tokens": self._gauge(
                "prefix_cache_tokens", "Tokens that the prefix cache holds.", prefix="invar"
            ),
            "kv_store_bytes": self._gauge(
                "kv_store_bytes", "Bytes of the KV store on disk.", prefix="invar"
            ),
        }
        self._totals = {
            "num_preemptions": self._counter("num_preemptions", "Requests set back to the queue."),
            "prefix_cache_queries": self._counter(
                "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
            ),
            "prefix_cache_hits": self._counter("prefix_cache_hits", "Of them, found computed."),
            "prefix_cache_evicted_tokens": self._counter(
                "prefix_cache_evicted_tokens", "Tokens evicted for want of memory.", prefix="invar"
            ),
            "external_prefix_cache_hits": self._counter(
                "external_prefix_cache_hits", "Tokens read from the KV store."
            ),
            "kv_store_pages_written": self._counter(
                "kv_store_pages_written", "Pages written to the KV store.", prefix="invar"
            ),
            "kv_store_pages_read": self._counter(
                "kv_store_pages_read", "Pages read from the KV store.", prefix="invar"
            ),
        }
        self._seen_totals = dict.fromkeys(self._totals, 0.0)
        self._create_token_metrics()
        self._create_request_metrics()
        self._unknown_fields = Counter(
            "invar:unknown_request_fields",
            "Requests with a field that this server does not know or that does nothing here.",
            ("field",),
            registry=self.registry,
        )

    def _create_token_metrics(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Of them, reused.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens delivered per step.", TOKEN_COUNT_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds",
            "Time between tokens.",
            TOKEN_GAP_BUCKETS,
            alias="time_per_output_token_seconds",
        )

    def _create_request_metrics(self) -> None:
        self._success = Counter(
            "vllm:request_success",
            "Requests ended, by reason.",
            ("model_name", "engine", "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._seconds = {
            name: self._histogram(f"{name}_seconds", text, REQUEST_BUCKETS)
            for name, text in (
                ("e2e_request_latency", "Arrival to end."),
                ("request_queue_time", "Arrival to first scheduling."),
                ("request_prefill_time", "First scheduling to first token."),
                ("request_decode_time", "First token to last."),
                ("request_inference_time", "First scheduling to last token."),
            )
        }
        self._token_time = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token.", TOKEN_GAP_BUCKETS
        )
        self._counts = {
            name: self._histogram(name, text, TOKEN_COUNT_BUCKETS)
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of a request."),
                ("request_generation_tokens", "Tokens generated for a request."),
                ("request_params_max_tokens", "max_tokens of a request."),
            )
        }
        self.request_n = self._histogram(
            "request_params_n", "Choices asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)
        )

    def _gauge(self, name: str, text: str, alias: str | None = None, prefix: str = "vllm") -> Gauge:
        metric = Gauge(f"{prefix}:{name}", text, tuple(self._labels), registry=self.registry)
        self._add_alias(metric, name, alias)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, prefix: str = "vllm") -> Counter:
        metric = Counter(f"{prefix}:{name}", text, tuple(self._labels), registry=self.registry)
        return metric.labels(**self._labels)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], alias: str | None = None
    ) -> Histogram:
        metric = Histogram(
            f"vllm:{name}", text, tuple(self._labels), registry=self.registry, buckets=buckets
        )
        self._add_alias(metric, name, alias)
        return metric.labels(**self._labels)

    def _add_alias(self, metric: Collector, name: str, alias: str | None) -> None:
        if alias is not None:
            self.registry.register(Alias(metric, f"vllm:{name}", f"vllm:{alias}"))

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def observe_step(self, stats: Mapping[str, float], tokens: int) -> None:
        """Takes the engine's gauges and running totals as one step reported them."""
        if tokens:
            self._iteration_tokens.observe(tokens)
        for name, gauge in self._gauges.items():
            value = stats.get(GAUGES[name])
            if value is not None:
                gauge.set(value)
        for name, counter in self._totals.items():
            total = stats.get(TOTALS[name], 0.0)
            if total > self._seen_totals[name]:
                counter.inc(total - self._seen_totals[name])
                self._seen_totals[name] = total

    def observe_first_token(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._first_token.observe(seconds)
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_tokens_cached.inc(cached_tokens)

    def observe_gap(self, seconds: float, tokens: int) -> None:
        """``tokens`` came together, ``seconds`` apart on average."""
        for _ in range(tokens):
            self._token_gap.observe(seconds)

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
        output_tokens: int,
        max_tokens: int,
    ) -> None:
        """An engine request has ended. Times are monotonic seconds; None: it never came to that."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._seconds["e2e_request_latency"].observe(end - arrival)
        self._counts["request_prompt_tokens"].observe(prompt_tokens)
        self._counts["request_generation_tokens"].observe(output_tokens)
        self._counts["request_params_max_tokens"].observe(max_tokens)
        if first_scheduled is not None:
            self._seconds["request_queue_time"].observe(max(0.0, first_scheduled - arrival))
        if first_token is None or last_token is None:
            return
        scheduled = arrival if first_scheduled is None else first_scheduled
        self._seconds["request_prefill_time"].observe(max(0.0, first_token - scheduled))
        self._seconds["request_decode_time"].observe(last_token - first_token)
        self._seconds["request_inference_time"].observe(max(0.0, last_token - scheduled))
        if output_tokens > 1:
            self._token_time.observe((last_token - first_token) / (output_tokens - 1))

    def count_unknown_field(self, name: str) -> None:
        self._unknown_fields.labels(field=name).inc()


class Alias(Collector):
    """A metric under a second name, copied when it is asked for."""

    def __init__(self, metric: Collector, name: str, alias: str) -> None:
        self._metric, self._name, self._alias = metric, name, alias

    def collect(self) -> Iterable[Metric]:
        for metric in self._metric.collect():
            copy = Metric(self._alias, f"Alias of {self._name}.", metric.type)
            copy.samples = [
                sample._replace(name=sample.name.replace(self._name, self._alias, 1))
                for sample in metric.samples
            ]
            yield copy
