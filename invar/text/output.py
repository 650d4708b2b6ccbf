"""The text of one choice: detokenizer and stop strings behind one call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from invar.text.detokenizer import Detokenizer
from invar.text.stop import StopStrings
from invar.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """What a group of tokens added to an answer.

    `tokens_used`: how many of the pushed tokens belong to the answer; usage and logprobs end there.
    `stop_reason`: the stop string or stop token id that ended it.
    `token_offsets`: for each used token the length of the answer's text before it, in characters.
    """

    text: str
    finished: bool
    stop_reason: str | int | None
    tokens_used: int
    token_offsets: list[int] = field(default_factory=list)


class TextAssembler:
    """Assembles one choice's text; the joined deltas do not depend on how tokens were grouped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown_ids: Collection[int] = (),
        at_start: bool = True,
    ) -> None:
        """`stop_token_ids`: every id that ends the answer, EOS too unless it is ignored.

        Up to `min_tokens` tokens nothing ends it. `at_start` and `shown_ids` as in Detokenizer.
        """
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            at_start=at_start,
            shown_ids=shown_ids,
        )
        self._stops = StopStrings(stop, include_stop_str_in_output)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._token_count = 0
        self._text_length = 0  # decoded so far, sent or held back
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Take the next tokens; stops at the one that completes a stop string."""
        texts: list[str] = []
        offsets: list[int] = []
        if self._finished:
            return TextDelta("", True, None, 0)
        for token_id in token_ids:
            self._token_count += 1
            offsets.append(self._text_length)
            reason = self._take(int(token_id), texts)
            if reason is not None:
                self._finished = True
                return TextDelta("".join(texts), True, reason, len(offsets), offsets)
        return TextDelta("".join(texts), False, None, len(offsets), offsets)

    def finish(self) -> TextDelta:
        """The answer ended for another reason (length, EOS, cancel): release what was held back."""
        if self._finished:
            return TextDelta("", True, None, 0)
        self._finished = True
        text, matched = self._stops.push(self._detokenizer.flush())
        return TextDelta(text + self._stops.flush(), True, matched, 0)

    def _take(self, token_id: int, texts: list[str]) -> str | int | None:
        may_stop = self._token_count > self._min_tokens
        if may_stop and token_id in self._stop_token_ids:
            if self._include_stop:
                texts.append(self._stops.push(self._detokenizer.push(token_id))[0])
            texts.append(self._stops.push(self._detokenizer.flush())[0])
            texts.append(self._stops.flush())
            return token_id
        text = self._detokenizer.push(token_id)
        self._text_length += len(text)
        if not may_stop:
            texts.append(text)
            return None
        emitted, matched = self._stops.push(text)
        texts.append(emitted)
        return matched
