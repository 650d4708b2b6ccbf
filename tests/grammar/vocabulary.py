"""A vocabulary of 97 tokens for grammars over the scripted runner."""

from __future__ import annotations

from invar.grammar.compiler import GrammarCompiler

EOS = 0
LETTERS = "abcdefghilmnoprstuvwyz"
WORDS = (
    '{"', '":', '": ', '","', '"}', '},{', "[{", "}]", "[]", "{}", '""', "true", "false", "null",
    "name", "age", "ye", "yes", "no", "level", "  ", "\n  ", "er", "in", "123", "he", "th",
)  # fmt: skip
TOKENS = [b"", *(one.encode() for one in (*WORDS, *LETTERS, *'{}[]":,.-+#~Q 0123456789\n\\/<>='))]
TOKENS += [bytes([one]) for one in b"ABCDEFGHIJKLMNOPRSTUVWXYZ"[: 97 - len(TOKENS)]]
BY_LENGTH = sorted((one for one in TOKENS if one), key=lambda one: -len(one))


class TinyTokenizer:
    """Greedy: the longest token that fits comes next."""

    vocab_size = len(TOKENS)
    bos_token_id = None
    stop_token_ids = frozenset({EOS})

    def is_control(self, token_id: int) -> bool:
        return token_id == EOS

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        return b"<eos>" if token_id == EOS else TOKENS[token_id]

    def encode_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            token = next((one for one in BY_LENGTH if rest.startswith(one)), None)
            if token is None:  # a byte that the tests' texts do not have
                break
            ids.append(TOKENS.index(token))
            rest = rest[len(token) :]
        return ids


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TinyTokenizer, len(TOKENS))


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENS[one] for one in ids).decode("utf-8", "replace")
