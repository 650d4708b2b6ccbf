"""LlamaIndex's OpenAILike over a server: prints what it got."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {
    "model": "tiny",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 12,
    "max_retries": 0,
}
chat = OpenAILike(**options, is_chat_model=True)
plain = OpenAILike(**options, is_chat_model=False)
messages = [ChatMessage(role="user", content="Name three rivers.")]


async def ask() -> str:
    return (await chat.achat(messages)).message.content


found = {
    "chat": chat.chat(messages).message.content,
    "stream": "".join(part.delta for part in chat.stream_chat(messages)),
    "async": asyncio.run(ask()),
    "complete": plain.complete("one two").text,
    "complete_stream": "".join(part.delta for part in plain.stream_complete("one two")),
}
print(json.dumps(found))
