"""Every metric by name: vLLM's names and labels, so that its dashboards work, and ours.

Names, kinds, labels and bucket bounds with the prefix ``vllm:`` are those of vLLM 0.33
(`vllm/v1/metrics/loggers.py`); ``http_`` ones are those of its HTTP instrumentation; what has no
name there begins with ``invar:``. vLLM's bounds are all kept; finer ones stand below them for
models that take a millisecond a token. Families of counters are named without the ``_total`` that
Prometheus sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# Of the environment: where several HTTP processes keep their values (see `exposition`).
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

MODEL = ("model_name", "engine")
PHASES = ("prefill", "decode", "mixed")  # of a step: rows of prompts, of answers, or of both
PEAKS = ("int8", "bf16", "fp32")  # what bounds a product: the kind of activations in it

SUM = "sum"  # in the place of a bound: the sum of a histogram of the engine's

# Seconds.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,  # ours
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2,  # ours
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_ROW_BOUNDS = (1, 8, *(1 << e for e in range(4, 15)))
HTTP_BUCKETS = (0.1, 0.5, 1.0)


class Kind(Enum):
    """What a metric is, and who knows it."""

    GAUGE = "gauge"  # of an HTTP process
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    ENGINE_GAUGE = "engine gauge"  # the engine reports it
    ENGINE_TOTAL = "engine total"  # the engine counts it from its own start
    ENGINE_HISTOGRAM = "engine histogram"  # likewise; values of `le` are not cumulative

    @property
    def prometheus(self) -> str:
        return self.value.removeprefix("engine ").replace("total", "counter")


@dataclass(frozen=True)
class Spec:
    """One metric. ``stats``: values of the labels behind `MODEL` → name in the engine's report."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = MODEL
    buckets: tuple[float, ...] = ()
    stats: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    alias: str | None = None  # a second name

    @property
    def sample(self) -> str:
        """The name that a query has, but for the endings of a histogram."""
        return f"{self.name}_total" if self.kind.prometheus == "counter" else self.name


def engine_gauge(name: str, text: str, stat: str, alias: str | None = None) -> Spec:
    return Spec(name, Kind.ENGINE_GAUGE, text, stats={(): stat}, alias=alias)


def engine_total(name: str, text: str, stat: str) -> Spec:
    return Spec(name, Kind.ENGINE_TOTAL, text, stats={(): stat})


def per_phase(name: str, text: str, stat: str) -> Spec:
    stats: dict[tuple[str, ...], str] = {(phase,): f"{phase}_{stat}" for phase in PHASES}
    return Spec(name, Kind.ENGINE_TOTAL, text, (*MODEL, "phase"), stats=stats)


def step_rows_name(bound: int | None) -> str:
    """Of steps with so many rows and more than the bound before; None: more than the last."""
    return f"steps_of_{bound or 'more'}_rows"


def counter(name: str, text: str, labels: tuple[str, ...] = MODEL) -> Spec:
    return Spec(name, Kind.COUNTER, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], alias: str | None = None) -> Spec:
    return Spec(name, Kind.HISTOGRAM, text, MODEL, buckets, alias=alias)


ENGINE = (
    engine_gauge("vllm:num_requests_running", "Requests in the batch.", "running"),
    engine_gauge("vllm:num_requests_waiting", "Requests in the queue.", "waiting"),
    Spec(
        "vllm:num_requests_waiting_by_reason",
        Kind.ENGINE_GAUGE,
        "Requests in the queue: for room in the batch or in KV memory; nothing else defers one.",
        (*MODEL, "reason"),
        stats={("capacity",): "waiting", ("deferred",): ""},
    ),
    engine_gauge(
        "vllm:kv_cache_usage_perc",
        "KV pages in use, 0 to 1.",
        "kv_usage",
        alias="vllm:gpu_cache_usage_perc",
    ),
    engine_gauge(
        "invar:kv_cache_unfilled_perc",
        "Of the KV pages in use, the share that holds no token, 0 to 1.",
        "kv_unfilled",
    ),
    engine_gauge(
        "invar:kv_cache_shared_bytes",
        "KV bytes that requests would hold more did they not share pages.",
        "kv_saved_by_sharing",
    ),
    engine_gauge(
        "invar:kv_cache_window_saved_bytes",
        "KV bytes that would be in use did layers with a window keep all tokens.",
        "kv_saved_by_windows",
    ),
    engine_gauge(
        "invar:prefix_cache_tokens", "Tokens that the prefix cache holds.", "cache_tokens"
    ),
    engine_gauge("invar:kv_store_bytes", "Bytes of the KV store on disk.", "store_bytes"),
    engine_gauge(
        "invar:max_num_seqs", "Most requests of a batch (--max-num-seqs).", "max_sequences"
    ),
    engine_gauge(
        "invar:max_num_batched_tokens",
        "Most rows of a step (--max-num-batched-tokens).",
        "max_rows",
    ),
    engine_total("vllm:num_preemptions", "Requests set back to the queue.", "preemptions"),
    engine_total(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        "cache_queries",
    ),
    engine_total("vllm:prefix_cache_hits", "Of them, found computed.", "cache_hits"),
    engine_total(
        "invar:prefix_cache_evicted_tokens", "Tokens evicted for want of memory.", "cache_evictions"
    ),
    engine_total(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that memory did not have, looked up in the KV store.",
        "store_queries",
    ),
    engine_total(
        "vllm:external_prefix_cache_hits", "Tokens read from the KV store.", "store_tokens"
    ),
    Spec(
        "vllm:prompt_tokens_by_source",
        Kind.ENGINE_TOTAL,
        "Prompt tokens by where their KV came from; external_kv_transfer: the KV store on disk.",
        (*MODEL, "source"),
        stats={
            ("local_compute",): "prompt_computed",
            ("local_cache_hit",): "prompt_from_memory",
            ("external_kv_transfer",): "prompt_from_store",
        },
    ),
    Spec(
        "vllm:prompt_tokens_cached_by_source",
        Kind.ENGINE_TOTAL,
        "Prompt tokens found computed, by where they were.",
        (*MODEL, "source"),
        stats={("device",): "prompt_from_memory", ("disk",): "prompt_from_store"},
    ),
    engine_total(
        "invar:kv_store_pages_written", "Pages written to the KV store.", "store_pages_written"
    ),
    engine_total("invar:kv_store_pages_read", "Pages read from the KV store.", "store_pages_read"),
    engine_total(
        "vllm:corrupted_requests", "Requests whose logits were NaN or infinite.", "corrupted"
    ),
    engine_total(
        "invar:engine_starts", "Starts of the engine: one more with every restart.", "starts"
    ),
    Spec(
        "vllm:iteration_tokens_total",
        Kind.ENGINE_HISTOGRAM,
        "Rows (tokens of prompts and answers) of a step.",
        (*MODEL, "le"),
        stats={
            **{(str(float(bound)),): step_rows_name(bound) for bound in STEP_ROW_BOUNDS},
            ("+Inf",): step_rows_name(None),
            (SUM,): "rows",
        },
    ),
    per_phase("invar:steps", "Steps of the engine.", "steps"),
    per_phase("invar:step_seconds", "Seconds that steps took.", "seconds"),
    per_phase("invar:step_rows", "Rows (tokens) that steps ran.", "rows"),
    per_phase("invar:step_sequences", "Requests in steps: occupancy of batches.", "sequences"),
    per_phase(
        "invar:step_read_bytes", "Weights and KV that steps had to read, each once.", "read_bytes"
    ),
    per_phase("invar:step_written_bytes", "KV that steps wrote.", "written_bytes"),
    Spec(
        "invar:step_operations",
        Kind.ENGINE_TOTAL,
        "Operations of products and attention, by the peak that bounds them (a multiply-add is 2).",
        (*MODEL, "phase", "peak"),
        stats={(phase, peak): f"{phase}_{peak}_ops" for phase in PHASES for peak in PEAKS},
    ),
    engine_total(
        "vllm:estimated_flops_per_gpu", "Operations of all steps; a GPU is this machine.", "ops"
    ),
    engine_total(
        "vllm:estimated_read_bytes_per_gpu", "Bytes that all steps had to read.", "read_bytes"
    ),
    engine_total(
        "vllm:estimated_write_bytes_per_gpu", "Bytes that all steps wrote.", "written_bytes"
    ),
    Spec(
        "invar:peak_operations_per_second",
        Kind.ENGINE_GAUGE,
        "What this machine multiplies at most, measured while the engine is idle; 0: not yet.",
        (*MODEL, "peak"),
        stats={(peak,): f"peak_{peak}_ops" for peak in PEAKS},
    ),
    engine_gauge(
        "invar:peak_read_bytes_per_second",
        "Rate at which this machine reads the weights at most, measured while the engine is idle.",
        "peak_read_bytes",
    ),
)

REQUESTS = (
    counter("vllm:prompt_tokens", "Prompt tokens processed."),
    counter("vllm:prompt_tokens_cached", "Of them, found computed."),
    counter("vllm:generation_tokens", "Tokens generated."),
    counter("vllm:request_success", "Requests ended, by reason.", (*MODEL, "finished_reason")),
    histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Time between tokens.",
        TOKEN_GAP_BUCKETS,
        alias="vllm:time_per_output_token_seconds",
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time a token of a request.",
        TOKEN_GAP_BUCKETS,
    ),
    histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS),
    histogram("vllm:request_queue_time_seconds", "Arrival to first scheduling.", REQUEST_BUCKETS),
    histogram(
        "vllm:request_prefill_time_seconds", "First scheduling to first token.", REQUEST_BUCKETS
    ),
    histogram("vllm:request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS),
    histogram(
        "vllm:request_inference_time_seconds", "First scheduling to last token.", REQUEST_BUCKETS
    ),
    histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS),
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not found computed.",
        TOKEN_COUNT_BUCKETS,
    ),
    histogram(
        "vllm:request_generation_tokens", "Tokens generated for a request.", TOKEN_COUNT_BUCKETS
    ),
    histogram(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest choice of a call.",
        TOKEN_COUNT_BUCKETS,
    ),
    histogram("vllm:request_params_max_tokens", "max_tokens of a request.", TOKEN_COUNT_BUCKETS),
    histogram("vllm:request_params_n", "Choices asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    histogram(
        "vllm:request_num_preemptions",
        "Times that a request was set back to the queue.",
        (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    ),
)

SERVER = (
    Spec(
        "vllm:engine_sleep_state",
        Kind.GAUGE,
        "1 at the state of the engine. This one never sleeps; awake is 0 while none is ready.",
        (*MODEL, "sleep_state"),
    ),
    Spec(
        "vllm:cache_config_info",
        Kind.GAUGE,
        "The KV cache, in labels; always 1.",
        (*MODEL, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
    Spec(
        "invar:queue_limit",
        Kind.GAUGE,
        "Most that may wait at an HTTP process (--max-num-queued-reqs, -tokens); absent: no limit.",
        (*MODEL, "of"),
    ),
    counter(
        "vllm:admission_rejections",
        "Requests refused because a queue was full.",
        ("model_name", "reason"),
    ),
    counter("invar:client_disconnects", "Requests whose client left before the answer was out."),
    counter(
        "invar:unknown_request_fields",
        "Requests with a field that this server does not know or that does nothing here.",
        ("field",),
    ),
    counter("invar:http_requests", "HTTP requests by route and status.", ("route", "status")),
    counter("invar:http_errors", "Error answers by their code.", ("code",)),
    counter(
        "http_requests",
        "HTTP requests to the API by class of status, as vLLM's dashboards ask for them.",
        ("handler", "method", "status"),
    ),
    Spec(
        "http_request_duration_seconds",
        Kind.HISTOGRAM,
        "Seconds from request to the end of the answer.",
        ("handler", "method"),
        HTTP_BUCKETS,
    ),
    counter(
        "invar:access_log_dropped", "Access lines that were not written: the log was too slow.", ()
    ),
)

METRICS = (*ENGINE, *REQUESTS, *SERVER)


def table() -> str:
    """The metrics as docs/observability.md lists them: `python -m invar.observe.catalogue`."""
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for spec in METRICS:
        names = f"`{spec.sample}`" + (f", `{spec.alias}`" if spec.alias else "")
        labels = ", ".join(label for label in spec.labels if label not in (*MODEL, "le"))
        lines.append(f"| {names} | {spec.kind.prometheus} | {labels} | {spec.text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
