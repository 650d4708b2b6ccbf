"""One choice of an answer: engine outputs in, text and cut logprobs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from invar.engine.request import EngineOutput, FinishReason, TokenLogprobs


class TextDelta(Protocol):
    """What the text side makes of some tokens."""

    @property
    def text(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def tokens_used(self) -> int: ...
    @property
    def token_offsets(self) -> list[int]: ...


class Assembler(Protocol):
    """Tokens to text, with what ends it (``invar.text.output.TextAssembler``)."""

    def push(self, token_ids: list[int]) -> TextDelta: ...

    def finish(self) -> TextDelta: ...


@dataclass(slots=True)
class ChoiceDelta:
    """What is new for one choice since the last look."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)  # characters of text before each
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False  # the error is the request's own: it can never run
    cached_tokens: int | None = None  # of the prompt, found computed; with the first token

    @property
    def items(self) -> int:
        """Tokens and alternatives in it: how long writing it down takes."""
        if not self.logprobs and not self.prompt_logprobs:
            return len(self.token_ids)
        scored = [*self.logprobs[-1:], *(self.prompt_logprobs or ())[-1:]]
        alternatives = max((len(one.top_ids) for one in scored if one is not None), default=0)
        positions = len(self.logprobs) + len(self.prompt_logprobs or ())
        return len(self.token_ids) + positions * (1 + alternatives)

    def extend(self, later: ChoiceDelta) -> None:
        """Joins what came later, so that a slow reader gets one frame in place of many."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.token_offsets += later.token_offsets
        self.logprobs += later.logprobs
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.refused = later.refused
        if later.cached_tokens is not None:
            self.cached_tokens = later.cached_tokens


class Choice:
    """The state of one engine request on the near side."""

    def __init__(
        self, index: int, assembler: Assembler, named_stop_ids: frozenset[int] = frozenset()
    ) -> None:
        """``named_stop_ids`` are the stop tokens that the caller named."""
        self.index = index
        self._assembler = assembler
        self._named_stop_ids = named_stop_ids

    def take(self, output: EngineOutput) -> tuple[ChoiceDelta, bool]:
        """Returns the delta and whether the engine has to be told to stop.

        The answer ends at the token that completes a stop string: what the engine computed
        beyond it is dropped here and never counted.
        """
        text = self._assembler.push(output.token_ids)
        token_ids, logprobs = output.token_ids, output.logprobs or []
        if text.finished:
            token_ids, logprobs = token_ids[: text.tokens_used], logprobs[: text.tokens_used]
        delta = ChoiceDelta(
            self.index,
            text.text,
            token_ids,
            text.token_offsets,
            logprobs,
            output.prompt_logprobs,
            error=output.error,
            refused=output.refused,
            cached_tokens=output.cached_tokens,
        )
        reason: int | str | None = output.stop_reason
        if text.finished:
            delta.finish_reason, reason = FinishReason.STOP, text.stop_reason
        elif output.finish_reason is not None:
            delta.text += self._assembler.finish().text
            delta.finish_reason = output.finish_reason
        # The model's own end of text is no reason worth naming (vLLM says null there).
        if isinstance(reason, str) or reason in self._named_stop_ids:
            delta.stop_reason = reason
        return delta, text.finished and output.finish_reason is None
