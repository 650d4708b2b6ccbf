"""JSON Schema as it is enforced: the official suite, and walks through schemas in real use."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from grammar.schema_data import real_schemas, suite
from invar.grammar.compiler import CompiledGrammar, GrammarCompiler
from invar.grammar.guide import Guide
from invar.grammar.structured_outputs import StructuredOutputs

RATCHET = json.loads((Path(__file__).parent / "suite_ratchet.json").read_text())
EOS = 256
PIECES = ('{"', '":', '","', '"}', "[]", "{}", "true", "false", "null", "  ", "\n ", "ab", "12")
SCHEMA_BYTES = 12_000  # larger ones take a second each
WALKS = 200


class ByteTokenizer:
    """Every byte, some pieces of JSON, and an end."""

    tokens = (*(bytes([one]) for one in range(256)), b"<eos>", *(one.encode() for one in PIECES))
    vocab_size = len(tokens)
    bos_token_id = None
    stop_token_ids = frozenset({EOS})

    def is_control(self, token_id: int) -> bool:
        return token_id == EOS

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        return self.tokens[token_id]

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())


COMPILER = GrammarCompiler(ByteTokenizer, ByteTokenizer.vocab_size)


def compiled(schema: Any) -> CompiledGrammar | None:
    """None: refused."""
    try:
        return COMPILER.check(StructuredOutputs(json=schema, strict=True).normalised())
    except ValueError:
        return None


def accepts(grammar: CompiledGrammar, instance: Any) -> bool:
    tokens = [*json.dumps(instance, ensure_ascii=False).encode(), EOS]
    return bool(grammar.matcher().validate_tokens(tokens) == len(tokens))


@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_the_official_suite(draft: str) -> None:
    """What is accepted is valid. What is refused, and valid instances that are not accepted
    (another order of properties, 1.0 for 1), may only get fewer."""
    counts: Counter[str] = Counter()
    for file, group in suite(draft):
        grammar = compiled(group["schema"])
        for test in group["tests"]:
            accepted = grammar is not None and accepts(grammar, test["data"])
            assert test["valid"] or not accepted, (file, group["description"], test["description"])
            if grammar is None:
                counts["refused"] += 1
            else:
                counts["right" if accepted == test["valid"] else "false_reject"] += 1
    assert dict(counts) == RATCHET[draft]


def wholes_and_parts() -> Iterator[Any]:
    """Real schemas, and some that they are made of."""
    for schema in real_schemas():
        if len(json.dumps(schema)) <= SCHEMA_BYTES:
            yield schema
            for name in ("definitions", "$defs"):
                for part in list(schema.get(name, {}))[:2]:
                    own = {"$schema": schema["$schema"], "$ref": f"#/{name}/{part}"}
                    yield own | {name: schema[name]}


def walk(grammar: CompiledGrammar, seed: int) -> bytes:
    """An answer of a model that finds every token equally likely."""
    chance = random.Random(seed)
    limit = 60 + len(grammar.end or ())
    guide = Guide(grammar, ByteTokenizer.vocab_size, max_tokens=limit)
    said = guide.replay([])
    while not guide.finished and guide.error is None and len(said) < limit:
        if said[-1:] == [EOS]:
            break
        if guide.mask_is_due:
            guide.write_mask()
            guide.mask_is_due = False
        bits = np.unpackbits(guide.mask[:-1].view(np.uint8), bitorder="little")
        said += guide.take(chance.choice(np.flatnonzero(bits).tolist()))
    assert guide.error is None
    return b"".join(ByteTokenizer.tokens[one] for one in said if one != EOS)


def test_walks_through_real_schemas() -> None:
    done = 0
    for index, schema in enumerate(wholes_and_parts()):
        if (grammar := compiled(schema)) is None:
            continue
        if grammar.end is None:  # its shortest answer has more bytes than are looked for
            continue
        text = walk(grammar, index)
        kind = jsonschema.validators.validator_for(schema)
        kind(schema).validate(json.loads(text))
        done += 1
        if done == WALKS:
            break
    assert done == WALKS
