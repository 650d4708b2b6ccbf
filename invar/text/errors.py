"""The errors of this package: faults of a file or a request, never of the engine."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer's metadata is unusable, or a text or token id cannot be converted."""


class ChatTemplateError(ValueError):
    """A chat template is missing, broken, or refuses the conversation."""


class TemplateRefusal(Exception):
    """The template called `raise_exception`: its own sentence for the caller."""


class TemplateLimit(Exception):
    """A template takes, writes or builds more than any prompt needs."""
