"""Five metrics that articles on watching vLLM name: right under load, in panels and in an alert."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml
from cli.commands import Serving, serving
from observe.exposed import samples

from .model import TINY

DEPLOY = Path(__file__).parents[2] / "deploy"
CALLS, TOGETHER, TOKENS = 12, 4, 400


def complete(server: Serving, number: int) -> float:
    """Seconds from request to answer."""
    body = {"prompt": [3 + number] * 50, "max_tokens": TOKENS, "ignore_eos": True}
    request = Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    began = time.monotonic()
    with urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return time.monotonic() - began


def scrape(server: Serving) -> dict[str, float]:
    """By name, and the bound of a bucket; there is one model."""
    with urlopen(f"{server.url}/metrics", timeout=20) as answer:
        found = samples(answer.read())
    named = {}
    for series, value in found.items():
        name, _, labels = series.partition("{")
        bound = labels.partition('le="')[2].partition('"')[0]
        named[f"{name} {bound}".strip()] = value
    return named


def test_right_under_load() -> None:
    with serving(TINY, "--max-num-seqs", str(TOGETHER)) as server:
        complete(server, 0)
        idle = scrape(server)
        seen: list[dict[str, float]] = []
        with ThreadPoolExecutor(CALLS) as pool:
            calls = [pool.submit(complete, server, number) for number in range(CALLS)]
            while not all(call.done() for call in calls):
                seen.append(scrape(server))
        times = [call.result() for call in calls]
        end = scrape(server)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert idle[name] == end[name] == 0
    assert max(one["vllm:num_requests_running"] for one in seen) == TOGETHER
    waiting = [one["vllm:num_requests_waiting"] for one in seen]
    assert 0 < max(waiting) <= CALLS - TOGETHER
    usage = [one["vllm:gpu_cache_usage_perc"] for one in seen]
    assert 0 < max(usage) <= 1
    assert usage == [one["vllm:kv_cache_usage_perc"] for one in seen]
    grown = {name: end[name] - idle.get(name, 0) for name in end}
    first, gap = "vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds"
    assert grown[f"{first}_count"] == CALLS
    assert grown[f"{gap}_count"] == CALLS * (TOKENS - 1)
    # No call takes longer, on the client's clock, than its first token and its gaps.
    assert 0 < grown[f"{first}_sum"] + grown[f"{gap}_sum"] <= sum(times)
    for name in (first, gap):
        buckets = [value for key, value in grown.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == grown[f"{name}_count"]


def test_panels_and_the_alert() -> None:
    panels: dict[str, Any] = {}
    for path in (DEPLOY / "grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                panels[f"{target['legendFormat']}: {target['expr']}"] = panel
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
        for legend in ("P50", "P99"):
            assert any(key.startswith(legend) and f"vllm:{name}_bucket" in key for key in panels)
    for name in ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"):
        assert any(f"vllm:{name}" in key for key in panels)
    rules = yaml.safe_load((DEPLOY / "prometheus/invar.rules.yml").read_text())
    alerts = {rule.get("alert"): rule for group in rules["groups"] for rule in group["rules"]}
    assert "vllm:kv_cache_usage_perc > 0.95" in alerts["InvarKVNearlyFull"]["expr"]
