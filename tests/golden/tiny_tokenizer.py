"""A small byte-level BPE vocabulary, as GGUF metadata and as tokenizer.json: tiny models are whole.

Ids: 0–255 the bytes in order, then one token for each merge, then control tokens. Any text encodes
and decodes; the ids of plain bytes are their values.
"""

from __future__ import annotations

from typing import Any

MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("i", "n"),
    ("e", "r"),
    ("o", "n"),
    ("Ġ", "a"),
    ("Ġa", "n"),
    ("r", "e"),
    ("Ġ", "w"),
    ("o", "r"),
    ("l", "l"),
)
CONTROLS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

FIRST_CONTROL = 256 + len(MERGES)
BOS, EOS, IM_START, IM_END = range(FIRST_CONTROL, FIRST_CONTROL + len(CONTROLS))
VOCAB_SIZE = FIRST_CONTROL + len(CONTROLS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NORMAL, CONTROL = 1, 3  # tokenizer.ggml.token_type


def byte_characters() -> list[str]:
    """GPT-2's visible character for each byte: itself if it prints, else the next from U+0100.

    `bytes_to_unicode` in
    https://github.com/openai/gpt-2/blob/9b63575ef42771a015060c964af2c3da4cf7c8ab/src/encoder.py
    """
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return [
        chr(byte) if byte in printing else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def tokenizer_metadata() -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file."""
    tokens = [*byte_characters(), *(left + right for left, right in MERGES), *CONTROLS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * FIRST_CONTROL + [CONTROL] * len(CONTROLS),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def hf_files() -> dict[str, Any]:
    """The same tokenizer as the files of a Hugging Face directory, by name."""
    tokens = tokenizer_metadata()["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    added = [
        {"id": tokens.index(token), "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for token in CONTROLS
    ]
    vocab = {token: index for index, token in enumerate(tokens[:FIRST_CONTROL])}
    model = {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in MERGES]}
    return {
        "tokenizer.json": {
            **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None},
            **{"added_tokens": added, "pre_tokenizer": byte_level, "post_processor": None},
            **{"decoder": byte_level, "model": model},
        },
        "tokenizer_config.json": {
            **{"bos_token": CONTROLS[0], "eos_token": CONTROLS[1], "add_bos_token": False},
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": [EOS, IM_END]},
    }
