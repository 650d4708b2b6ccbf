"""Names, restarts of the engine, bounds, and several HTTP processes as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from invar.observe import catalogue
from invar.observe.catalogue import METRICS
from invar.observe.metrics import MAX_NAMES, CountedHistogram, Metrics

from .exposed import samples

# Bounds that queries of dashboards may name (vLLM 0.33, `vllm/v1/metrics/loggers.py`).
VLLM_BOUNDS = {
    "vllm:inter_token_latency_seconds": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 80.0),
    "vllm:time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 2560.0),
    "vllm:e2e_request_latency_seconds": (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 7680.0),
    "vllm:request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
}
# name → labels, of what vLLM's dashboards, its example alerts and routers ask for.
VLLM_LABELS = {
    "vllm:num_requests_waiting_by_reason": {"model_name", "engine", "reason"},
    "vllm:engine_sleep_state": {"model_name", "engine", "sleep_state"},
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:gpu_cache_usage_perc": {"model_name", "engine"},
    "vllm:request_success_total": {"model_name", "engine", "finished_reason"},
    "vllm:prompt_tokens_by_source_total": {"model_name", "engine", "source"},
    "vllm:estimated_flops_per_gpu_total": {"model_name", "engine"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name", "engine"},
    "vllm:time_per_output_token_seconds_bucket": {"model_name", "engine", "le"},
}
STEP = {"started": 5.0, "running": 2.0, "waiting": 1.0, "preemptions": 3.0, "decode_rows": 10.0}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """Of the one series with these labels."""
    (found,) = [
        number
        for series, number in samples(metrics.render()).items()
        if series.partition("{")[0] == name
        and all(f'{label}="{text}"' in series for label, text in labels.items())
    ]
    return found


def test_all_names_are_there_from_the_start() -> None:
    text = Metrics("m").render().decode()
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if "# TYPE" in line}
    for spec in METRICS:
        assert types[spec.sample] == spec.kind.prometheus
        assert spec.alias is None or spec.alias in types
        assert spec.text.endswith(".")
    assert len({spec.sample for spec in METRICS}) == len(METRICS)
    assert "process_start_time_seconds" in types


def test_the_page_lists_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    _, _, rest = page.partition("<!-- python -m invar.observe.catalogue -->\n")
    listed, _, _ = rest.partition("<!-- end -->")
    assert listed == catalogue.table(), "run python -m invar.observe.catalogue"


def test_names_labels_and_bounds_of_vllm() -> None:
    found = samples(Metrics("m").render())
    for name, labels in VLLM_LABELS.items():
        series = next(one for one in found if one.startswith(name + "{"))
        assert {part.split("=")[0] for part in series.split("{")[1].split(",")} == labels
    for spec in METRICS:
        assert set(VLLM_BOUNDS.get(spec.name, ())) <= set(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))
    # 600 tokens a second are told from 300, and 300 from 200.
    gaps = catalogue.TOKEN_GAP_BUCKETS
    assert all(any(low < bound < high for bound in gaps) for low, high in ((1 / 600, 1 / 300),))


def test_totals_go_on_over_a_restart_of_the_engine() -> None:
    metrics = Metrics("m")
    metrics.observe_report(STEP)
    assert value(metrics, "vllm:num_preemptions_total") == 3
    seen = []
    # The new engine counts from 0; soon it has counted as far as the old one, and further.
    for count in (0.0, 2.0, 3.0, 7.0):
        metrics.observe_report(STEP | {"started": 6.0, "preemptions": count, "running": 1.0})
        seen.append(value(metrics, "vllm:num_preemptions_total"))
    assert seen == [3, 5, 6, 10]
    assert value(metrics, "invar:engine_starts_total") == 2
    assert value(metrics, "vllm:num_requests_running") == 1
    metrics.observe_report({})  # nothing new
    assert value(metrics, "vllm:num_requests_running") == 1


def test_a_histogram_that_the_engine_counts() -> None:
    metrics = Metrics("m")
    for started in (5.0, 6.0):
        stats = {"steps_of_1_rows": 2.0, "steps_of_32_rows": 1.0, "steps_of_more_rows": 1.0}
        metrics.observe_report(stats | {"started": started, "rows": 20_033.0})
    buckets = {"1.0": 4, "8.0": 4, "16.0": 4, "32.0": 6, "64.0": 6, "16384.0": 6, "+Inf": 8}
    for bound, steps in buckets.items():
        assert value(metrics, "vllm:iteration_tokens_total_bucket", le=bound) == steps
    assert value(metrics, "vllm:iteration_tokens_total_count") == 8
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 40_066


def test_limits_of_the_queue_and_the_cache_in_labels() -> None:
    metrics = Metrics("m")
    metrics.show_queue_limits(16, None)
    metrics.show_cache(block_size=32, blocks=8, dtype="bf16", prefix_caching=True)
    assert value(metrics, "invar:queue_limit") == 16
    labels = {"block_size": "32", "num_gpu_blocks": "8", "enable_prefix_caching": "True"}
    assert value(metrics, "vllm:cache_config_info", cache_dtype="bf16", **labels) == 1


def test_names_that_clients_make_up_are_bounded() -> None:
    metrics = Metrics("m")
    for number in range(3 * MAX_NAMES):
        metrics.count_unknown_field(f"field{number}")
    series = [name for name in samples(metrics.render()) if "unknown_request_fields" in name]
    assert len(series) == MAX_NAMES + 1
    assert value(metrics, "invar:unknown_request_fields_total", field="other") == 2 * MAX_NAMES


PROCESS = """
import sys
from invar.observe.metrics import Metrics
metrics = Metrics("m")
for line in sys.stdin:
    if line == "render\\n":
        sys.stdout.write(metrics.render().decode() + "# END\\n")
    else:
        exec(line)
        sys.stdout.write("# END\\n")
    sys.stdout.flush()
"""


class Process:
    def __init__(self, folder: Path) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, line: str) -> dict[str, float]:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        text = ""
        while not text.endswith("# END\n"):
            text += (read := self.child.stdout.readline())
            assert read, "the process has ended"
        return samples(text)

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> list[Process]:
    return [Process(tmp_path) for _ in range(2)]


def test_any_process_answers_for_all(processes: list[Process], tmp_path: Path) -> None:
    first, second = processes
    model = 'engine="0",model_name="m"'
    step = f"metrics.observe_report({STEP})"
    first.run(step)  # both hear of the same engine
    second.run(step)
    for process in processes:
        process.run("metrics.observe_tokens(5); metrics.observe_gap(0.002, 4)")
    expected = {
        f"vllm:generation_tokens_total{{{model}}}": 10,
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.002",model_name="m"}': 8,
        f"vllm:time_per_output_token_seconds_count{{{model}}}": 8,
        f"vllm:num_preemptions_total{{{model}}}": 3,
        f"vllm:num_requests_running{{{model}}}": 2,
        f"invar:engine_starts_total{{{model}}}": 1,
    }
    for process in processes:
        found = process.run("render")
        assert {name: found.get(name) for name in expected} == expected
    # One dies with no chance to say a word, and the engine starts anew; another takes its place.
    first.kill()
    third = Process(tmp_path)
    third.run("pass")
    assert (
        second.run("render")[f"vllm:num_requests_running{{{model}}}"] == 2
    )  # it knows nothing yet
    again = STEP | {"started": 6.0, "preemptions": 1.0, "running": 1.0}
    third.run(f"metrics.observe_tokens(1); metrics.observe_report({again})")
    for process in (second, third):
        found = process.run("render")
        assert found[f"vllm:generation_tokens_total{{{model}}}"] == 11
        assert found[f"vllm:num_preemptions_total{{{model}}}"] == 4
        assert found[f"vllm:num_requests_running{{{model}}}"] == 1
        assert found[f"invar:engine_starts_total{{{model}}}"] == 2
        process.kill()


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.0123, 1e6])
def test_many_equal_gaps_count_as_so_many(seconds: float) -> None:
    registry = CollectorRegistry()
    histograms = [
        CountedHistogram(name, name, buckets=(0.002, 0.1), registry=registry)
        for name in ("many", "each")
    ]
    histograms[0].observe_many(seconds, 3)
    for _ in range(3):
        histograms[1].observe(seconds)
    many, each = (
        {(s.name.split("_")[-1], s.labels.get("le")): s.value for s in metric.samples}
        for metric in registry.collect()
    )
    assert many == pytest.approx(each)
