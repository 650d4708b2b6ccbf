"""Counting tokens of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from invar.serving.choice import ChoiceDelta


@dataclass
class Usage:
    """Each prompt counts once, however many choices it has; tokens of all choices add up.

    Choices reuse what the first one computed. What the call found computed is what that one found:
    the least of all.
    """

    prompt_tokens: int
    choices_per_prompt: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of these
    _cached: dict[int, int] = field(default_factory=dict)  # prompt → tokens found in the cache

    def take(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self.completion_tokens += len(delta.token_ids)
            prompt = delta.index // self.choices_per_prompt
            if delta.cached_tokens is not None:
                least = self._cached.get(prompt, delta.cached_tokens)
                self._cached[prompt] = min(least, delta.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
