"""From options to a running model: what is built beside what, and what is loaded at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from golden.tiny_models import model_path

from invar.backends.cpu.runner import CpuRunner
from invar.config import EngineConfig
from invar.engine import loader
from invar.text.errors import ChatTemplateError, TokenizerError

CONFIG = EngineConfig(model=str(model_path("llama_gqa")), num_threads=1, max_num_seqs=2)
PATIENCE_S = 30


def test_the_text_side_is_built_while_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, text_built = threading.Event(), threading.Event()
    load_text = loader.load_text

    def slow_text(*given: Any) -> Any:
        assert packing.wait(PATIENCE_S), "packing waits for the tokenizer"
        text_built.set()
        return load_text(*given)

    class SlowRunner(CpuRunner):
        def __init__(self, *given: Any, **sizes: Any) -> None:
            packing.set()
            assert text_built.wait(PATIENCE_S), "the tokenizer waits for packing"
            super().__init__(*given, **sizes)

    monkeypatch.setattr(loader, "load_text", slow_text)
    monkeypatch.setattr(loader, "CpuRunner", SlowRunner)
    model = loader.load_engine(CONFIG)
    assert model.tokenizer.vocab_size == model.info.vocab_size
    model.close()


@pytest.mark.parametrize(
    ("options", "fault", "kind"),
    [
        ({}, "tokenizer", TokenizerError),
        ({"chat_template": "{% for %}"}, None, ChatTemplateError),
        ({"max_logprobs": 10_000}, None, ValueError),
    ],
)
def test_a_fault_beside_packing_comes_out_as_itself_and_leaves_no_runner(
    options: dict[str, Any],
    fault: str | None,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    class ClosingRunner(CpuRunner):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def broken(*_: object) -> None:
        raise TokenizerError("tokenizer.ggml.merges: missing")

    monkeypatch.setattr(loader, "CpuRunner", ClosingRunner)
    if fault:
        monkeypatch.setattr(loader, "load_tokenizer", broken)
    config = EngineConfig(model=CONFIG.model, num_threads=1, max_num_seqs=2, **options)
    with pytest.raises(kind, match=r"merges: missing|chat template, line 1|max_logprobs: 10000"):
        loader.load_engine(config)
    assert len(closed) == 1


def test_what_is_not_used_is_not_loaded() -> None:
    """Base models have no template, and Linux says itself how much memory is free."""
    program = (
        "import sys; from invar.engine.loader import load_engine; "
        "from invar.config import EngineConfig; "
        "print(sorted({'jinja2', 'psutil', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
