"""A chat body with SGLang's `regex` and `json_schema`, and one whose JSON has a wrong escape."""

from __future__ import annotations

import json
import re
import sys

import httpx
from cli.commands import listening

from .model import TINY

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_row_23() -> None:
    words = ("serve", TINY, "--port", "0", "--kv-store", "off", "--response-store", "off")
    command = (sys.executable, "-m", "invar", *words, "--chat-template", TEMPLATE)
    with listening(*command) as server:

        def post(body: str) -> httpx.Response:
            headers = {"content-type": "application/json"}
            route = f"{server.url}/v1/chat/completions"
            return httpx.post(route, content=body, headers=headers, timeout=60)

        def text(**fields: object) -> str:
            messages = [{"role": "user", "content": "x"}]
            answer = post(json.dumps({"messages": messages, "max_tokens": 60, **fields}))
            assert answer.status_code == 200, answer.text
            content: str = answer.json()["choices"][0]["message"]["content"]
            return content

        assert re.fullmatch(r"\{[^}]+\}", text(regex=r"\{[^}]+\}"))
        assert set(json.loads(text(json_schema=SCHEMA))) >= {"name", "age"}
        assert set(json.loads(text(json_schema=json.dumps(SCHEMA)))) >= {"name", "age"}
        wrong = post('{"messages": [{"role": "user", "content": "x"}],\n "regex": "\\{[^}]+\\}"}')
        assert wrong.status_code == 400
        assert re.search(r"line 2,? column 1\d", wrong.json()["error"]["message"])
        assert server.end() == 0
