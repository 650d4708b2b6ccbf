"""`invar serve` with a tiny model, and what it says without any client in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli.commands import serving

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")
HI = [{"role": "user", "content": "Name three rivers."}]


@dataclass
class Tiny:
    url: str

    def chat(self, messages: list[dict[str, Any]] = HI, **fields: Any) -> list[str]:
        """The texts of the choices."""
        body = {"messages": messages, **fields}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = str(tmp_path_factory.mktemp("kept"))
    with serving(TINY, "--served-model-name", "tiny", "--response-store", folder) as server:
        yield Tiny(server.url)
