"""What is in deploy/ names metrics that exist, under a Prometheus of Debian's that scrapes a real
server and evaluates the rules."""

from __future__ import annotations

import configparser
import json
import re
import runpy
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cli.commands import Serving, serving

from invar.cli import serve
from invar.cli.rewrite import rewrite
from invar.observe.metrics import Metrics

from .collector import collecting
from .exposed import samples

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TINY = str(ROOT / "tests" / "golden" / "llama_gqa.gguf")
NAME = re.compile(r"\b(?:vllm|invar):[a-z0-9_:]+|\bhttp_[a-z_]+|\bprocess_[a-z_]+")

# Series that vLLM's own dashboards ask for (`examples/observability` of 0.33), with a filter that
# each of them uses. LoRA, speculation and media are not built here.
VLLM_ASKS = [
    "vllm:num_requests_running{engine=~'.*'}",
    "vllm:num_requests_waiting{engine=~'.*'}",
    "vllm:num_requests_waiting_by_reason{reason='capacity'}",
    "vllm:num_requests_waiting_by_reason{reason='deferred'}",
    "vllm:kv_cache_usage_perc{model_name=~'.*'}",
    "vllm:gpu_cache_usage_perc",
    "vllm:engine_sleep_state{sleep_state='awake'} == 1",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total{source='local_compute'}",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total{finished_reason='length'}",
    "vllm:request_success_total{finished_reason='error'}",
    "vllm:time_to_first_token_seconds_bucket{le='0.001'}",
    "vllm:inter_token_latency_seconds_bucket{le='0.01'}",
    "vllm:time_per_output_token_seconds_bucket{le='0.025'}",
    "vllm:e2e_request_latency_seconds_bucket{le='0.3'}",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket{le='100.0'}",
    "vllm:request_generation_tokens_bucket{le='100.0'}",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_n_sum",
    "vllm:request_params_max_tokens_bucket{le='10.0'}",
    "vllm:iteration_tokens_total_sum",
    "vllm:cache_config_info{block_size='32', cache_dtype='bf16'}",
    "http_requests_total{status='2xx', handler='/v1/completions'}",
    "http_request_duration_seconds_bucket{le='0.1'}",
    "process_start_time_seconds",
]


def rules() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/invar.rules.yml").read_text())
    return loaded


def expressions() -> dict[str, str]:
    """What is asked of Prometheus, by where it stands."""
    found = {}
    for group in rules()["groups"]:
        for rule in group["rules"]:
            found[rule.get("alert") or rule["record"]] = rule["expr"]
    for path in (DEPLOY / "grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_every_metric_that_is_named_exists() -> None:
    exposed = {name.partition("{")[0] for name in samples(Metrics("m").render())}
    text = Metrics("m").render().decode()
    exposed |= {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    recorded = {
        rule["record"] for g in rules()["groups"] for rule in g["rules"] if "record" in rule
    }
    named = {name: where for where, expr in expressions().items() for name in NAME.findall(expr)}
    assert len(named) > 40
    unknown = {name: where for name, where in named.items() if name not in exposed | recorded}
    histograms = {name + ending for name in exposed for ending in ("_bucket", "_sum", "_count")}
    assert not {n: where for n, where in unknown.items() if n not in histograms}


def test_dashboards_are_those_that_the_script_writes() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana/make.py"))["files"]()
    assert {path.name for path in made} == {
        path.name for path in (DEPLOY / "grafana/dashboards").iterdir()
    }
    for path, text in made.items():
        assert path.read_text() == text, "run python deploy/grafana/make.py"


def test_the_units_command_is_understood() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd/invar.service")
    program, command, *words = unit["Service"]["ExecStart"].split()
    assert (Path(program).name, command) == ("invar", "serve")
    rewritten = rewrite("serve", words, serve.parser().own)
    assert not rewritten.notices
    assert int(unit["Service"]["TimeoutStopSec"]) > 30


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of prometheus and promtool."""
    fetched = subprocess.run(
        [str(DEPLOY / "prometheus/fetch.sh")], capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        pytest.fail(f"these tests need Debian's package prometheus\n{fetched.stderr}")
    return Path(fetched.stdout.strip())


def promtool(programs: Path, *words: str, given: str | None = None) -> tuple[int, str]:
    result = subprocess.run(
        [str(programs / "promtool"), *words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return result.returncode, result.stdout + result.stderr


def test_promtool_agrees_with_rules_and_configuration(programs: Path) -> None:
    for words in (
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("check", "rules", "deploy/prometheus/invar.rules.yml"),
        ("test", "rules", "tests/observe/rules.test.yml"),
    ):
        code, said = promtool(programs, *words)
        assert code == 0, said


# What promtool dislikes and vLLM's names have.
KNOWN_COMPLAINTS = (
    "metric names should not contain ':'",
    'non-counter metrics should not have "_total" suffix',
    "metric name should not include type 'info'",
    "use base unit",
    "metric names should not contain abbreviated units",
)


def test_promtool_reads_the_metrics(programs: Path) -> None:
    _, said = promtool(programs, "check", "metrics", given=Metrics("m").render().decode())
    others = [line for line in said.splitlines() if not any(c in line for c in KNOWN_COMPLAINTS)]
    assert not others, "\n".join(others)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:  # it is just starting
            return False

    def ask(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expr)["result"]
        return found

    def wait_for(self, expr: str, within_s: float = 30) -> None:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if self.is_ready() and self.query(expr):
                return
            time.sleep(0.1)
        raise AssertionError(f"nothing for {expr}")


@contextmanager
def scraping(programs: Path, folder: Path, server: Serving) -> Iterator[Prometheus]:
    """The configuration of deploy/, with the server's port and at a faster pace."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    address = server.url.removeprefix("http://")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [address]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                str(programs / "prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def test_a_real_prometheus_over_a_real_server(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")  # left over from another server
    with (
        collecting() as collector,
        serving(
            TINY, "--served-model-name", "tiny", "--otlp-traces-endpoint", collector.url
        ) as server,
        scraping(programs, tmp_path, server) as prometheus,
    ):
        prometheus.wait_for("up{job='invar'} == 1")
        body = {"prompt": [3 + n for n in range(40)], "max_tokens": 10, "ignore_eos": True}
        complete(server, body)
        prometheus.wait_for("vllm:generation_tokens_total == 10")
        # Rates need two scrapes; what the machine can do is measured after a second without work.
        prometheus.wait_for("invar:phase_memory_share:rate1m{phase='decode'} > 0")
        prometheus.wait_for("invar:phase_compute_share:rate1m{phase='decode'} > 0")
        for asked in VLLM_ASKS:
            assert prometheus.query(asked), asked
        for expr in expressions().values():
            prometheus.query(filled(expr))  # an error says what is wrong with it
        groups = prometheus.ask("rules")["groups"]
        states = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert {rule["health"] for rule in states.values()} == {"ok"}, states
        assert not [name for name, rule in states.items() if rule.get("state") == "firing"]
        assert server.end() == 0
        span = collector.named("text_completion tiny")
    assert "PROMETHEUS_MULTIPROC_DIR has nothing to do here" in server.printed()
    lines = [json.loads(line) for line in server.lines if line.startswith('{"time"')]
    traced = [line["trace_id"] for line in lines if "trace_id" in line]
    assert traced == [span.trace_id.hex()]


def complete(server: Serving, body: dict[str, Any]) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def filled(expr: str) -> str:
    """With values for the variables of a dashboard."""
    for name in ("$model_name", "$instance"):
        expr = expr.replace(name, ".*")
    return expr.replace("$__rate_interval", "1m")
