"""Where `invar serve` keeps responses, and that it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from invar.cli.http_side import kept_responses
from invar.weights.model_cache import cache_root

from .commands import serving

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = (TINY, "--chat-template", str(tmp_path / "template.jinja"))
    words += ("--response-store", str(tmp_path / "kept"), "--response-store-size", "1MiB")
    with serving(*words) as server:
        said = server.printed()
        assert f"kept in {tmp_path / 'kept'}, up to 1" in said
        assert "for 30 days" in said
        body = {"input": "one two three", "max_output_tokens": 4, "seed": 3}
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
        assert answer["store"] is True
        assert server.end() == 0
    with serving(*words) as server:
        path = f"{server.url}/v1/responses/{answer['id']}"
        assert httpx.get(path).json() == answer


def test_http_processes_share_them(tmp_path: Path) -> None:
    """Whichever process takes a request, it finds what another has kept, and cancels it."""
    words = (TINY, "--api-server-count", "2", "--response-store", str(tmp_path / "kept"))
    with serving(*words) as server:

        def ask(method: str, path: str, **body: Any) -> dict[str, Any]:
            # A connection of its own each time, so that either process may take it.
            answer = httpx.request(method, f"{server.url}{path}", json=body or None, timeout=60)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        kept = ask("POST", "/v1/responses", input="one", max_output_tokens=4)
        path = f"/v1/responses/{kept['id']}"
        assert all(ask("GET", path) == kept for _ in range(12))
        for _ in range(6):
            body = {"input": "two", "max_output_tokens": 4, "previous_response_id": kept["id"]}
            kept = ask("POST", "/v1/responses", **body)
        begun = [ask("POST", "/v1/responses", input="one", background=True) for _ in range(6)]
        for one in begun:
            ask("POST", f"/v1/responses/{one['id']}/cancel")
        ends = {ask("GET", f"/v1/responses/{one['id']}")["status"] for one in begun}
        assert ends <= {"cancelled", "completed", "incomplete"}
        assert server.end() == 0


def test_where_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INVAR_CACHE", str(tmp_path))
    assert kept_responses("off", None) is None
    kept = kept_responses(None, None)
    assert kept is not None
    assert kept.store.path == cache_root() / "responses" / "responses.sqlite"
    kept.store.close()
    kept.store.path.write_bytes(b"no database" * 100)
    capsys.readouterr()
    assert kept_responses(None, None) is None
    assert "none are kept: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="not a database"):
        kept_responses(str(kept.store.path.parent), None)
