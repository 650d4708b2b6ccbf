"""Real weights through the exact interpreter: the first word that any user would check."""

from __future__ import annotations

import numpy as np

from invar.graph.interpreter import Interpreter
from invar.models.registry import build
from invar.weights.gguf import GGUFFile
from invar.weights.sources import pull, resolve

PROMPT = ("The", "▁capital", "▁of", "▁France", "▁is")


def ids_of(source: GGUFFile, pieces: tuple[str, ...]) -> list[int]:
    """Ids by spelling, so that this test needs no tokenizer; a space is written as ▁."""
    spellings = [token.replace("Ġ", "▁") for token in source.metadata["tokenizer.ggml.tokens"]]
    return [spellings.index(piece) for piece in pieces]


def next_tokens(source: GGUFFile, token_ids: list[int], count: int) -> list[str]:
    """The most probable next tokens, best first."""
    interpreter = Interpreter(build(source), source)
    logits = interpreter.step(interpreter.new_sequence(), token_ids)[-1]
    tokens = source.metadata["tokenizer.ggml.tokens"]
    return [tokens[token].replace("Ġ", "▁") for token in np.argsort(-logits)[:count]]


def test_smollm2_knows_the_capital_of_france() -> None:
    source = GGUFFile(resolve("smollm2"))
    assert next_tokens(source, ids_of(source, PROMPT), 1) == ["▁Paris"]


def test_gemma3_knows_the_capital_of_france() -> None:
    source = GGUFFile(pull("gemma3-270m"))
    prompt = [source.get_int("tokenizer.ggml.bos_token_id"), *ids_of(source, PROMPT)]
    # A base model of 270 million weights: "the" and "a" may come before.
    assert "▁Paris" in next_tokens(source, prompt, 5)
