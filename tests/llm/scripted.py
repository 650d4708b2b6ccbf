"""An `LLM` whose model says what a script says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from engine.scripted_runner import HashRunner, Rules, mix, runner_info
from golden.tiny_tokenizer import VOCAB_SIZE, tokenizer_metadata

import invar.llm
from invar.config import EngineConfig
from invar.engine.door import Door
from invar.engine.engine import Engine
from invar.engine.loader import LoadedModel
from invar.llm import LLM
from invar.text.chat_template import ChatTemplate
from invar.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf(tokenizer_metadata())


@dataclass
class Script(Rules):
    """Says `says[prompt]` after a prompt, by ids; letters made up from its hash after any other."""

    says: dict[str, list[int]] = field(default_factory=dict)

    def token(self, seen: list[int], draw: tuple[int, ...], forbidden: frozenset[int]) -> int:
        for prompt, ids in self.says.items():
            start = TOKENIZER.encode(prompt).tolist()
            if seen[: len(start)] == start:
                return ids[len(seen) - len(start)]
        return ord("a") + mix([*seen, *draw]) % 26


def scripted_llm(
    monkeypatch: pytest.MonkeyPatch, says: dict[str, str | list[int]] | None = None
) -> LLM:
    script = Script(
        says={
            prompt: list(text.encode()) if isinstance(text, str) else text
            for prompt, text in (says or {}).items()
        }
    )
    info = replace(runner_info(), vocab_size=VOCAB_SIZE)

    def load(config: EngineConfig) -> LoadedModel:
        engine = Engine(HashRunner(info, script))
        door = Door(
            vocab_size=VOCAB_SIZE,
            max_model_len=engine.max_model_len,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            eos_token_ids=TOKENIZER.stop_token_ids,
            encode=lambda text: TOKENIZER.encode(text, add_special_tokens=False),
        )
        template = ChatTemplate.from_gguf(tokenizer_metadata())
        return LoadedModel(config, Path("m.gguf"), engine, info, TOKENIZER, template, door)

    monkeypatch.setattr(invar.llm, "load_engine", load)
    return LLM(model="scripted")
