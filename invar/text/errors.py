"""The two errors of this package; both are faults of a file or a request, never of the engine."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer's metadata is unusable, or a text or token id cannot be converted."""


class ChatTemplateError(ValueError):
    """A chat template is missing, broken, or refuses the conversation."""
