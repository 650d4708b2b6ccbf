"""The commands themselves: what they print, how they end, what they import."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from articles.model import TINY
from golden.hf_form import write_hf_directory

from .commands import INVAR, environment, invar, listening, serving


def test_help_lists_the_commands() -> None:
    for words in ([], ["--help"], ["-h"]):
        result = invar(*words)
        assert result.returncode == 0
        for command in ("run", "serve", "pull", "inspect", "bench"):
            assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", ["run", "serve", "pull", "inspect"])
def test_every_command_has_help(command: str) -> None:
    result = invar(command, "--help")
    assert result.returncode == 0
    assert "usage: invar" in result.stdout


def test_version() -> None:
    assert invar("--version").stdout.startswith("invar ")


@pytest.mark.parametrize(("words", "said"), [
    (["serv"], "nearest: serve"),
    (["run", "-cbs", "256"], "nearest: -cb"),
    (["run", "-p", "x", "--seed", "many"], "--seed"),
    (["run", "-n", "5"], "stdin is empty"),
    (["run", "-n", "abc", "-p", "x"], "--max-tokens/-n: 'abc' is not a whole number"),
    (["run", "-p", ""], "-p: the prompt is empty"),
    (["run", "Why is the sky blue?"], "a prompt goes after -p, in quotes: invar run -p 'Why is"),
    (["run", "hello", "world"], "a prompt goes after -p, in quotes"),
    (["run", "-p", "x", "--color", "maybe"], "--color maybe"),
    (["run", "-p", "x", "-j", "{}", "--grammar", "g"], "--grammar and --json-schema exclude"),
    (["serve", "--port", "99999"], "--port: 99999 is outside 0 … 65535"),
])  # fmt: skip
def test_usage_errors_end_with_2_and_one_line(words: list[str], said: str) -> None:
    result = invar(*words)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize(("words", "said"), [
    (["run", "-m", "/nowhere.gguf", "-p", "x"], "there is no such file"),
    (["serve", "/nowhere.gguf", "--port", "0"], "there is no such file"),
    (["inspect", "/nowhere.gguf"], "there is no such file"),
    (["run", "-p", "x", "--temp", "-1"], "temperature"),
    (["run", "-p", "x", "--chat-template", "/nowhere"], "--chat-template"),
    (["serve", "a.gguf", "-m", "b.gguf"], "two models"),
    (["serve", "--allowed-origins", "foo", "--port", "0"], "--allowed-origins: 'foo'"),
    (["run", "-f", "/nowhere.txt"], "-f /nowhere.txt: No such file"),
    (["run", "-p", "x", "-jf", "/nowhere.json"], "--json-schema-file /nowhere.json: No such file"),
    (["run", "-p", "x", "-j", "{"], "--json-schema: json: no valid JSON"),
    (["run", "-p", "x", "--grammar", 'root ::= foo'], "--grammar: grammar: GBNF"),
    (["serve", "--task", "embed"], "--task='embed' is not supported"),
    (["serve", "--tensor-parallel-size", "2"], "found 1"),
    (["inspect", "--lengths", "many"], "--lengths"),
    (["run", "-p", "x", "-t", "-4"], "--threads: -4"),
    (["run", "-p", "x", "-n", "0"], "--max-tokens: 0"),
    (["run", "-p", "x", "-n", "-5"], "--max-tokens: -5"),
    (["run", "-p", "x", "-np", "-3"], "--max-num-seqs: -3"),
    (["serve", "-np", "-3"], "--max-num-seqs: -3"),
    (["serve", "-b", "8", "-np", "16"], "max_num_batched_tokens: 8"),
])  # fmt: skip
def test_other_errors_end_with_1_and_no_traceback(words: list[str], said: str) -> None:
    result = invar(*words)
    assert result.returncode == 1, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("words", ["--help", "help", "--version", "run --help", "help run"])
@pytest.mark.parametrize("buffering", ["0", "1"])
def test_output_that_cannot_be_written_is_no_traceback(words: str, buffering: str) -> None:
    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {' '.join(INVAR)} {words} {line}"],
            capture_output=True,
            text=True,
            env={**environment(), "PYTHONUNBUFFERED": buffering.strip("0")},
            check=False,
            timeout=60,
        )

    full = shell(">/dev/full")
    assert full.returncode == 1
    assert full.stderr.splitlines()[0].endswith("No space left on device")
    assert len(full.stderr.splitlines()) == 1
    left = shell("| true")
    assert (left.returncode, left.stderr) == (0, "")


def test_help_of_a_command_and_the_module_itself() -> None:
    assert invar("help", "run").stdout == invar("run", "--help").stdout
    assert "smollm2, gemma3-270m" in invar("pull", "--help").stdout
    assert "usage: invar bench engine [MODEL] | kernels" in invar("help", "bench").stdout
    module = subprocess.run(
        [sys.executable, "-m", "invar", "--version"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    import invar as package

    assert module.stdout == f"invar {package.__version__}\n"


@pytest.mark.parametrize(("words", "absent"), [
    (["--help"], ["fastapi", "numpy", "argparse", "rich"]),
    (["run", "-n", "1", "-p", "Hi"], ["fastapi", "starlette", "uvicorn", "pydantic", "rich",
                                      "prometheus_client", "huggingface_hub", "typer", "asyncio",
                                      "invar.engine.page_store"]),
])  # fmt: skip
def test_commands_import_only_what_they_use(words: list[str], absent: list[str]) -> None:
    code = (
        "import sys\nfrom invar.cli.main import main\n"
        f"code = main({words!r})\n"
        f"print('LOADED', sorted(set({absent!r}) & set(sys.modules)), code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert result.stdout.splitlines()[-1] == "LOADED [] 0"


def test_run_answers_on_stdout_alone() -> None:
    result = invar("run", "-n", "12", "-p", "Hello", "--temp", "0")
    assert result.returncode == 0
    assert result.stdout.strip()
    assert not result.stderr
    assert "\033" not in result.stdout
    again = invar("run", "-n", "12", "-p", "Hello", "--temp", "0", "-t", "1")
    assert again.stdout == result.stdout


def test_run_with_a_seed_repeats() -> None:
    words = ["run", "-n", "16", "-p", "Tell me something", "--temp", "1.2", "--seed"]
    first, second, other = (invar(*words, seed).stdout for seed in ("5", "5", "6"))
    assert first == second != other


def test_the_answer_has_the_form_that_was_asked_for(tmp_path: Path) -> None:
    grammar = 'root ::= "wet" | "dry"'
    words = ["run", "-n", "40", "--temp", "0", "-p", "Is water wet?"]
    chosen = invar(*words, "--grammar", grammar)
    assert chosen.returncode == 0, chosen.stderr
    assert chosen.stdout.strip() in ("wet", "dry")
    file = tmp_path / "wet.gbnf"
    file.write_text(grammar)
    assert invar(*words, "--grammar-file", str(file)).stdout == chosen.stdout
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    answer = invar(*words, "-j", json.dumps(schema))
    assert isinstance(json.loads(answer.stdout)["wet"], bool)
    file.write_text(json.dumps(schema))
    assert invar(*words, "-jf", str(file)).stdout == answer.stdout
    ignored = invar(*words, "-j", json.dumps({"enum": [1], "uniqueItems": True}))
    assert json.loads(ignored.stdout) == 1
    assert "--json-schema: " in ignored.stderr
    assert "uniqueItems" in ignored.stderr


def test_a_prompt_can_be_piped() -> None:
    piped = invar("run", "-n", "8", "--temp", "0", stdin="Hello\n")
    assert piped.returncode == 0
    assert piped.stdout == invar("run", "-n", "8", "--temp", "0", "-p", "Hello").stdout
    assert piped.stdout == invar("run", "-n", "8", "--temp", "0", "-p", "-", stdin="Hello").stdout


def test_what_is_piped_follows_the_prompt_where_asked() -> None:
    words = ["run", "-n", "8", "--temp", "0", "-p"]
    joined = invar(*words, "Hello", "-f", "-", stdin="world\n")
    assert joined.stdout == invar(*words, "Hello\nworld").stdout
    unread = invar(*words, "Hello", stdin="world\n")
    assert unread.stdout == invar(*words, "Hello").stdout
    assert "-f - adds it" in unread.stderr


def test_what_is_piped_must_be_utf8() -> None:
    result = subprocess.run(
        [*INVAR, "run"], input=b"abc\xff", capture_output=True, env=environment(), check=False
    )
    assert result.returncode == 1
    assert result.stderr == b"invar: stdin is not UTF-8 (byte 3)\n"


def test_a_pipe_that_stays_open_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    result = subprocess.run(
        [*INVAR, "run", "-n", "2", "-p", "Hello"],
        stdin=reading,
        capture_output=True,
        env=environment(),
        check=False,
        timeout=60,
    )
    os.close(reading)
    os.close(writing)
    assert result.returncode == 0
    assert result.stdout.strip()


def test_the_reader_may_leave() -> None:
    command = f"{' '.join(INVAR)} run -n 200 -p Hello --ignore-eos </dev/null | head -c 5"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=60,
    )
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_ctrl_c_stops_one_answer() -> None:
    process = subprocess.Popen(
        [*INVAR, "run", "-p", "Count to a million", "--ignore-eos"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


class Chat:
    """`invar run` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [*INVAR, "run", *words],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**environment(), "XDG_STATE_HOME": "/nonexistent/x", "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""

    def until(self, text: str, within_s: float = 60) -> str:
        """Reads until ``text`` stands in what is new; returns that."""
        new, end = "", time.monotonic() + within_s
        while text not in new:
            assert time.monotonic() < end, new
            try:
                new += os.read(self.fd, 4096).decode("utf-8", "replace")
            except OSError as error:  # the other side has gone
                raise AssertionError(new) from error
        return new

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_chat_in_a_terminal() -> None:
    chat = Chat("-n", "400", "--ignore-eos", "--temp", "0")
    assert "/bye" in chat.until(">>> ")
    chat.type("Hello\n")
    chat.until("\n")
    time.sleep(1)
    chat.process.send_signal(signal.SIGINT)  # stops the answer, not the program
    chat.until(">>> ")
    chat.type("/clear\n")
    chat.until(">>> ")
    chat.type("/bye\n")
    assert chat.process.wait(30) == 0


def test_ctrl_d_ends_the_chat() -> None:
    chat = Chat("-n", "5")
    chat.until(">>> ")
    chat.type("\x04")
    assert chat.process.wait(30) == 0


def test_inspect_as_text_and_json() -> None:
    text = invar("inspect")
    assert text.returncode == 0
    assert "Q4_1" in text.stdout
    assert "KV per token" in text.stdout
    report = json.loads(invar("inspect", "--json", "--lengths", "100").stdout)
    assert report["architecture"] == "llama"
    assert report["context_length"] == 8192
    # 2 x 30 layers x 3 KV heads x 64 x 2 bytes
    assert report["memory"]["kv_bytes_per_token"] == 23040
    assert list(report["memory"]["kv_bytes"]) == ["100"]
    assert report["memory"]["kv_bytes"]["100"]["1"] >= 128 * 23040  # four pages, in a slab
    assert sum(t["bytes"] for t in report["tensors"]) == report["memory"]["weights_bytes"]


def test_a_hugging_face_directory_is_inspected_run_and_served(tmp_path: Path) -> None:
    directory = str(write_hf_directory("llama_gqa", tmp_path / "model", "BF16", shards=2))
    report = json.loads(invar("inspect", directory, "--json").stdout)
    assert report["formats"]["BF16"]["tensors"] == len(report["tensors"])
    assert report["memory"]["kv_bytes_per_token"] == 256
    assert "safetensors, architecture llama" in invar("inspect", directory).stdout
    run = invar("run", directory, "-p", "hello", "-n", "4", "--ignore-eos")
    assert run.returncode == 0, run.stderr
    assert run.stdout
    with listening(*INVAR, "serve", directory, "--port", "0", "--max-num-seqs", "2") as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert answer["system_fingerprint"]


def test_pull_prints_a_path() -> None:
    result = invar("pull", "smollm2")
    assert result.returncode == 0, result.stderr
    assert os.path.isfile(result.stdout.strip())


def test_serve_says_where_and_how_and_ends_cleanly() -> None:
    with serving("--max-model-len", "512", "--served-model-name", "tiny") as server:
        assert "KV cache" in server.printed()
        assert "tiny" in server.printed()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["model"] == "tiny"
        port = server.url.rpartition(":")[2]
        taken = invar("serve", "--port", port)
        assert taken.returncode == 1
        assert "in use" in taken.stderr
        assert server.end(signal.SIGTERM) == 0


def test_the_printed_curl_works() -> None:
    with serving("--max-model-len", "256", "--host", "0.0.0.0") as server:
        end = time.monotonic() + 10
        while "-d '" not in server.printed() and time.monotonic() < end:
            time.sleep(0.01)
        command = server.printed()
        command = command[command.index("curl ") : command.index("}'") + 2]
        result = subprocess.run(
            ["bash", "-c", f"{command} --silent --max-time 60"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(result.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_curl_for_a_model_without_template(needs_key: bool) -> None:
    from invar.cli.listening import curl

    command = curl("http://x:1", False, needs_key)
    assert "/v1/completions" in command
    assert ("Authorization" in command) == needs_key


def test_seed_minus_one_is_random() -> None:
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5}
    texts = set()
    for _ in range(2):
        with serving("--max-model-len", "256", "--seed", "-1") as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 2


def test_serve_on_ipv6() -> None:
    with serving("--max-model-len", "256", "--host", "::1") as server:
        assert "[::1]" in server.url
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_serve_ends_on_ctrl_c_with_a_stream_open() -> None:
    with serving("--max-model-len", "2048", "--shutdown-timeout", "1") as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True})
        with socket.create_connection((host, int(port))) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            assert server.end(signal.SIGINT) == 3  # an answer was cut
            assert time.monotonic() - began < 10


def test_a_budget_of_thoughts(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[-1].content }}<think>\n")
    words = ["run", "-m", str(TINY), "--chat-template", str(template), "-p", "x", "--seed", "3"]
    words += ["-n", "40", "--ignore-eos"]
    free, bounded = invar(*words), invar(*words, "--reasoning-budget", "5")
    assert "</think>" not in free.stdout
    thought = bounded.stdout.partition("</think>")[0]
    assert free.stdout.startswith(thought)
    assert "--reasoning-budget: -2" in invar(*words, "--reasoning-budget", "-2").stderr
