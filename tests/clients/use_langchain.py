"""LangChain's ChatOpenAI over a server: prints what it got."""

import asyncio
import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI

url = f"{sys.argv[1]}/v1"
options = {"model": "tiny", "base_url": url, "api_key": "none", "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**options, max_tokens=12)
PROMPT = "Name three rivers."


async def ask() -> list[str]:
    plain = await model.ainvoke(PROMPT)
    streamed = "".join([chunk.content async for chunk in model.astream(PROMPT)])
    return [plain.content, streamed]


answer = model.invoke(PROMPT)
chunks = list(model.stream(PROMPT, stream_usage=True))
responses = ChatOpenAI(**options, max_tokens=12, use_responses_api=True)
try:
    model.invoke("one two " * 2000)
    error = None
except openai.BadRequestError as failed:
    error = failed.code
found = {
    "invoke": answer.content,
    "usage": answer.usage_metadata,
    "finish": answer.response_metadata["finish_reason"],
    "stream": "".join(chunk.content for chunk in chunks),
    "stream_usage": sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata),
    "batch": [one.content for one in model.batch([PROMPT, "Two"])],
    "async": asyncio.run(ask()),
    "responses": responses.invoke(PROMPT).text,
    "responses_stream": "".join(chunk.text for chunk in responses.stream(PROMPT)),
    "completion": OpenAI(**options, max_tokens=6).invoke("one two"),
    "error": error,
}
print(json.dumps(found))
