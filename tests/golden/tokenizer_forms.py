"""Small tokenizers in files other than tokenizer.json (written by `make_tokenizers.py`)."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent / "tokenizers"
NAMES = tuple(sorted(folder.name for folder in HERE.glob("*")))

SPECIALS = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    "",
    " ",
    "  ",
    "word",
    " word",
    "  two  blanks  ",
    "\n",
    "\n\n\nlines\n \n\t tab\t\ttabs\r\n",
    "<|im_start|>word",
    "<|im_start|> word",
    "word<|im_end|>word<|im_end|> word",
    "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start> is no <|token|>, <|im_end| neither",
    "I'll say it's 'quoted', they've WE'VE we'd",
    "x = 123456 + 7.5e-3; y[10000] = 0x1F",
    "naïve cafe\u0301 Ångström",  # e with a combining accent
    "日本語の文章、混ざった English と数字123。",
    "Привет, мир! 안녕하세요 세계 שלום",
    "👩‍🚀 flag 🏳️‍🌈 thumbs 👍🏽",
    "zero\u200bwidth\u00a0nbsp\u3000wide ﬁne ＡＢ",
    "\x00 control \x07 \x1b[0m",
    "https://example.org/a_b-c?d=e&f=%20#g",
    "    def f(x):\n        return x  # comment\n",
    "▁marks▁▁of spaces",
    "the the the model models modelling tokenizer " * 3,
    "!!!???...,,,---___===",
)


def expected_ids(name: str) -> list[list[int]]:
    found: list[list[int]] = json.loads((HERE / name / "expected.json").read_text())
    return found
