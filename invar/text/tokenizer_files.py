"""Tokenizers in other files than tokenizer.json, presented as one.

| files                  | what it is                                   |
|------------------------|----------------------------------------------|
| tokenizer.model        | SentencePiece, BPE or unigram                |
| tokenizer.model        | ranks of tiktoken, as Meta publishes Llama 3 |
| vocab.json, merges.txt | byte-level BPE of GPT-2 or Qwen              |

tokenizer_config.json, special_tokens_map.json and added_tokens.json add tokens to each.
"""

from __future__ import annotations

from invar.text.byte_level_files import from_merges, from_ranks
from invar.text.errors import TokenizerError
from invar.text.sentencepiece_files import from_sentencepiece
from invar.text.tokenizer_entries import FILE, MERGES, MODEL, VOCAB, WORD_PIECES, TextFiles


def with_tokenizer(files: TextFiles) -> TextFiles:
    """The files with a tokenizer.json among them, if others make one. Raises `TokenizerError`."""
    if FILE in files:
        return files
    if MODEL in files:
        data: bytes = files[MODEL]
        return from_ranks(files, data) if is_text(data) else from_sentencepiece(files, data)
    if VOCAB in files and MERGES in files:
        return from_merges(files)
    if WORD_PIECES in files:
        raise TokenizerError(
            f"{WORD_PIECES}: a vocabulary of WordPiece without {FILE} is not supported; no family "
            "of language models that runs here has one"
        )
    return files


def is_text(data: bytes) -> bool:
    """tiktoken's ranks are lines of base64; a protobuf begins with a byte that is no letter."""
    return data[:1].isalnum() or data[:1] in (b"+", b"/")
