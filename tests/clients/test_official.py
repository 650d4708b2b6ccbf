"""The official clients over a real model: every dialect gives the bytes that plain HTTP gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from .conftest import HI, Tiny

MESSAGES: Any = HI
SEEDED: Any = {"seed": 7, "temperature": 0.8}
PROMPT = "Name three rivers."


@pytest.fixture(scope="module")
def client(tiny: Tiny) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(tiny: Tiny) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> str:
    (text,) = tiny.chat(max_tokens=16, **SEEDED)
    assert text
    return text


def test_chat(client: openai.OpenAI, expected: str) -> None:
    call: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, **SEEDED}
    create = client.chat.completions.create
    assert create(**call).choices[0].message.content == expected
    chunks = list(create(**call, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 16
    with client.chat.completions.stream(**call) as stream:
        assert stream.get_final_completion().choices[0].message.content == expected
    raw = client.chat.completions.with_raw_response.create(**call)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == expected
    with client.chat.completions.with_streaming_response.create(**call) as response:
        assert b"chat.completion" in response.read()


def test_chat_async(tiny: Tiny) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:
            calls = [
                client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=16, seed=seed
                )
                for seed in range(6)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [tiny.chat(max_tokens=16, seed=s)[0] for s in range(6)]


def test_responses(client: openai.OpenAI, expected: str, tiny: Tiny) -> None:
    call: Any = {"model": "tiny", "input": PROMPT, "max_output_tokens": 16, "temperature": 0.8}
    call["extra_body"] = {"seed": 7}
    first = client.responses.create(**call)
    assert first.output_text == expected
    with client.responses.stream(**call) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(parts) == expected
    second = client.responses.create(**call | {"input": "Two", "previous_response_id": first.id})
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "Two"},
    ]
    assert [second.output_text] == tiny.chat(conversation, max_tokens=16, **SEEDED)
    background = client.responses.create(**call, background=True)
    while background.status in ("queued", "in_progress"):
        background = client.responses.retrieve(background.id)
    assert background.output_text == expected


def test_messages(claude: anthropic.Anthropic, expected: str) -> None:
    call: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16}
    call["extra_body"] = {"seed": 7, "temperature": 0.8}
    answer = claude.messages.create(**call)
    assert answer.content[0].text == expected
    with claude.messages.stream(**call) as stream:
        assert stream.get_final_text() == expected
    raw = claude.messages.with_raw_response.create(**call)
    assert raw.parse().content[0].text == expected
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert [model.id for model in claude.models.list()] == ["tiny"]
    assert claude.models.retrieve("tiny").display_name == "tiny"


def test_messages_async(tiny: Tiny, expected: str) -> None:
    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=tiny.url, api_key="none") as client:
            body = {"seed": 7, "temperature": 0.8}
            async with client.messages.stream(
                model="tiny", messages=MESSAGES, max_tokens=16, extra_body=body
            ) as stream:
                return await stream.get_final_text()

    assert asyncio.run(ask()) == expected


def test_completions(client: openai.OpenAI) -> None:
    call: Any = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "seed": 7}
    text = client.completions.create(**call).choices[0].text
    streamed = client.completions.create(**call, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_a_conversation_that_is_too_long(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    long: Any = [{"role": "user", "content": "one two " * 2000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as failed:
        client.chat.completions.create(model="tiny", messages=long)
    assert failed.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.responses.create(model="tiny", input=long)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        claude.messages.create(model="tiny", messages=long, max_tokens=5)
