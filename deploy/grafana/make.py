"""Writes the dashboards from the panels below: `python deploy/grafana/make.py`.

A panel is a title, a unit and its queries with their legends. Percentiles of vLLM's histograms, and
every other query, filter by the variables ``model_name`` and ``instance``, as vLLM's dashboards do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
ONLY = 'model_name=~"$model_name", instance=~"$instance"'
HTTP = 'instance=~"$instance"'
WINDOW = "$__rate_interval"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3  # Grafana's grid is 24 wide


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    text: str = ""


def percentiles(title: str, histogram: str, text: str = "") -> Panel:
    buckets = f"sum by (le) (rate({histogram}_bucket{{{ONLY}}}[{WINDOW}]))"
    queries = [
        (f"histogram_quantile({part}, {buckets})", f"P{part * 100:.0f}")
        for part in (0.5, 0.9, 0.99)
    ]
    return Panel(title, "s", tuple(queries), text)


def rate(counter: str, by: str = "", only: str = ONLY) -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({counter}{{{only}}}[{WINDOW}]))"


def share(part: str, whole: str) -> str:
    return f"{rate(part)} / ({rate(whole)} > 0)"


def mean(histogram: str) -> str:
    return share(f"{histogram}_sum", f"{histogram}_count")


OVERVIEW = (
    Panel(
        "Requests by end",
        "reqps",
        ((rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
    ),
    Panel(
        "Tokens",
        "short",
        (
            (rate("vllm:prompt_tokens_total"), "prompt tokens/s"),
            (rate("vllm:prompt_tokens_cached_total"), "of them found computed"),
            (rate("vllm:generation_tokens_total"), "generated tokens/s"),
        ),
    ),
    Panel(
        "Running and waiting",
        "short",
        (
            (f"sum (vllm:num_requests_running{{{ONLY}}})", "running"),
            (f"sum (vllm:num_requests_waiting{{{ONLY}}})", "waiting"),
            (f'max (invar:queue_limit{{of="requests", {ONLY}}})', "most that may wait"),
        ),
    ),
    percentiles("Time to first token", "vllm:time_to_first_token_seconds"),
    percentiles("Time between tokens", "vllm:time_per_output_token_seconds"),
    percentiles("Whole requests", "vllm:e2e_request_latency_seconds"),
    Panel(
        "Where requests spend their time (mean)",
        "s",
        tuple(
            (mean(f"vllm:request_{phase}_time_seconds"), phase)
            for phase in ("queue", "prefill", "decode")
        ),
    ),
    Panel(
        "KV memory in use",
        "percentunit",
        ((f"max by (instance) (vllm:gpu_cache_usage_perc{{{ONLY}}})", "{{instance}}"),),
        "Above 95 % with requests waiting an alert fires.",
    ),
    Panel(
        "Lengths (mean)",
        "short",
        (
            (mean("vllm:request_prompt_tokens"), "prompt"),
            (mean("vllm:request_generation_tokens"), "answer"),
            (mean("vllm:request_params_n"), "choices"),
        ),
    ),
    Panel(
        "HTTP answers",
        "reqps",
        ((rate("invar:http_requests_total", "route, status", HTTP), "{{route}} {{status}}"),),
    ),
    Panel(
        "Errors by code",
        "reqps",
        ((rate("invar:http_errors_total", "code", HTTP), "{{code}}"),),
    ),
    Panel(
        "Turned away, and gone",
        "reqps",
        (
            (rate("vllm:admission_rejections_total", "reason"), "{{reason}}"),
            (rate("invar:client_disconnects_total"), "client left"),
        ),
    ),
)

ENGINE = (
    Panel(
        "Share of the machine's products",
        "percentunit",
        ((f"invar:phase_compute_share:rate1m{{{ONLY}}}", "{{phase}}"),),
        "Time that the products would take at the machine's peaks, of the time of the steps.",
    ),
    Panel(
        "Share of the memory's rate",
        "percentunit",
        ((f"invar:phase_memory_share:rate1m{{{ONLY}}}", "{{phase}}"),),
        "Weights and KV that steps read, of what the machine reads in their time.",
    ),
    Panel(
        "Occupancy of batches",
        "percentunit",
        ((f"invar:phase_occupancy:rate1m{{{ONLY}}}", "{{phase}}"),),
        "Requests in a step, of --max-num-seqs.",
    ),
    Panel(
        "Time by phase",
        "percentunit",
        ((rate("invar:step_seconds_total", "phase"), "{{phase}}"),),
        "What is missing to 100 % is idle.",
    ),
    Panel(
        "Time of a step",
        "s",
        (
            (
                f"{rate('invar:step_seconds_total', 'phase')} / "
                f"({rate('invar:steps_total', 'phase')} > 0)",
                "{{phase}}",
            ),
        ),
    ),
    Panel(
        "Rows of a step",
        "short",
        (
            (
                f"{rate('invar:step_rows_total', 'phase')} / "
                f"({rate('invar:steps_total', 'phase')} > 0)",
                "{{phase}}",
            ),
            (f"max (invar:max_num_batched_tokens{{{ONLY}}})", "most"),
        ),
    ),
    Panel(
        "Prompt tokens by source",
        "short",
        ((rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
    ),
    Panel(
        "Prefix cache: found",
        "percentunit",
        (
            (share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "memory"),
            (
                share(
                    "vllm:external_prefix_cache_hits_total",
                    "vllm:external_prefix_cache_queries_total",
                ),
                "of the rest, on disk",
            ),
        ),
    ),
    Panel(
        "Prefix cache: tokens",
        "short",
        (
            (f"sum (invar:prefix_cache_tokens{{{ONLY}}})", "held"),
            (rate("invar:prefix_cache_evicted_tokens_total"), "evicted/s"),
        ),
    ),
    Panel(
        "KV bytes saved",
        "bytes",
        (
            (f"sum (invar:kv_cache_shared_bytes{{{ONLY}}})", "by sharing"),
            (f"sum (invar:kv_cache_window_saved_bytes{{{ONLY}}})", "by windows"),
        ),
    ),
    Panel(
        "KV store",
        "bytes",
        ((f"sum (invar:kv_store_bytes{{{ONLY}}})", "on disk"),),
    ),
    Panel(
        "Set back, corrupted, started",
        "short",
        (
            (rate("vllm:num_preemptions_total"), "preemptions/s"),
            (f"sum (vllm:corrupted_requests_total{{{ONLY}}})", "requests with NaN"),
            (f"sum (invar:engine_starts_total{{{ONLY}}})", "starts of the engine"),
        ),
    ),
)

DASHBOARDS = {
    "invar-overview": ("Invar: requests", OVERVIEW),
    "invar-engine": ("Invar: engine", ENGINE),
}


def dashboard(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["invar"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "DS_PROMETHEUS",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                variable("model_name", "label_values(vllm:num_requests_running, model_name)"),
                variable(
                    "instance",
                    'label_values(vllm:num_requests_running{model_name=~"$model_name"}, instance)',
                ),
            ]
        },
        "panels": [drawn(number, panel) for number, panel in enumerate(panels)],
    }


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def drawn(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": name,
            }
            for index, (expr, name) in enumerate(panel.queries)
        ],
    }


def files() -> dict[Path, str]:
    """What the folder must hold."""
    return {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
