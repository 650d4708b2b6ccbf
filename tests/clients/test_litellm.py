"""LiteLLM's proxy in front of Invar: clients of both dialects get the bytes of plain HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .conftest import HI, Tiny
from .environment import clients_python, environment

MESSAGES: Any = HI
START_S = 180  # it imports for 5 s on a machine with nothing else to do


def config(url: str) -> str:
    """A proxy's file (YAML is JSON too): one model in each of the dialects."""
    served = {
        "chat": {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1"},
        "responses": {"model": "openai/tiny", "api_base": f"{url}/v1"},
        "messages": {"model": "anthropic/tiny", "api_base": url},
    }
    models = [
        {"model_name": name, "litellm_params": {**params, "api_key": "none"}}
        for name, params in served.items()
    ]
    return json.dumps({"model_list": models, "litellm_settings": {"telemetry": False}})


@pytest.fixture(scope="module")
def proxy(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("litellm")
    (home / "config.yaml").write_text(config(tiny.url))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python: Path = clients_python()
    words = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [python, python.parent / "litellm", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env=environment(home),
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, (home / "log").read_text()[-3000:]
            assert time.monotonic() < end, (home / "log").read_text()[-3000:]
            try:
                httpx.get(f"{url}/health/liveliness").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_chat(proxy: str, tiny: Tiny) -> None:
    call: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    (text,) = tiny.chat(temperature=0, max_tokens=12)
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**call)
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        chunks = client.chat.completions.create(**call, stream=True)
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(parts) == text
        assert {model.id for model in client.models.list()} == {"chat", "responses", "messages"}
        # It tells a context that is too long from other errors by the words of ours.
        long: Any = [{"role": "user", "content": "one two " * 2000}]
        with pytest.raises(openai.BadRequestError, match="ContextWindowExceededError"):
            client.chat.completions.create(model="chat", messages=long)


def test_responses(proxy: str, tiny: Tiny) -> None:
    (text,) = tiny.chat(temperature=0, max_tokens=16)
    # 16 is the least that it lets through here.
    call: Any = {"model": "responses", "input": HI[0]["content"], "temperature": 0}
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(**call, max_output_tokens=16).output_text == text
        events = client.responses.create(**call, max_output_tokens=16, stream=True)
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(parts) == text


def test_messages(proxy: str, tiny: Tiny) -> None:
    (text,) = tiny.chat(temperature=0, max_tokens=12)
    call: Any = {"model": "messages", "messages": MESSAGES, "max_tokens": 12}
    call["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=proxy, api_key="none", max_retries=0) as client:
        assert client.messages.create(**call).content[0].text == text
        with client.messages.stream(**call) as stream:
            assert stream.get_final_text() == text
