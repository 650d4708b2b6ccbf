"""A request's way through its grammar: masks, forced tokens, and an end before the limit.

Everything here is a function of the request and of its tokens so far (law 1): a guide that replays
the tokens of an interrupted answer is where the first one was.

Near `max_tokens` a drawn token must leave room for an end of the grammar. One that does not is
dropped, and the first token of an end that does fit takes its place. Whether it fits is looked at
more often the less room there is: one token may open what takes as many tokens to close as the
shortest answer has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from invar._native import publish_mask
from invar.grammar.compiler import CompiledGrammar

Mask = npt.NDArray[np.uint32]

GROWTH = 16  # tokens by which one may lengthen the shortest end, beside those of a whole answer
LOST = 8  # tokens until an end is looked for again where there was none


class Guide:
    """Of one request. Its engine's thread and a `MaskWriter` take turns at it: from
    `mask_is_due` to a mask that is ready it belongs to the writer."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        vocab_size: int,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        allowed: Mask | None = None,
        completes: bool = True,
        jumps: bool = True,
    ) -> None:
        """allowed: a mask that holds as well. completes: lead the answer to an end before
        `max_tokens`. jumps: forced tokens come without being drawn."""
        self._matcher = grammar.matcher()
        self._completer = grammar.completer
        self._allowed = allowed
        self._left = max_tokens
        self._before_stop = min_tokens
        self._stop_token_ids = stop_token_ids
        self._jumps = jumps
        end = grammar.end
        if end is not None and len(end) > max_tokens:
            end = grammar.shortest
        self._completes = completes and end is not None
        self._end: Sequence[int] = end or ()  # of the state when it was last looked at
        self._growth = GROWTH + len(self._end)
        self._look_in = self._patience()
        # uint32 [words + 1], as `SamplingBatch.masks` has them.
        self.mask: Mask = np.zeros(-(-vocab_size // 32) + 1, np.uint32)
        self.mask_is_due = True  # it is not the mask of the next token, and nobody writes it
        self.finished = False  # the answer is whole and nothing can follow
        self.steered = False  # a token was replaced for want of room
        self.error: str | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.mask[-1])

    def replay(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that the answer has so far, if any; returns what is forced after them."""
        for token in tokens:
            if self.finished or self.error:
                break
            self._accept(token)
        return self._forced()

    def take(self, token: int) -> list[int]:
        """What the answer goes on with after `token` was drawn: it, and what is forced after it.

        Another one in its place where it left no room; nothing where that must be drawn first.
        """
        if self._accept(token):
            return [token, *self._forced()]
        required = self._end[0]
        if self._jumps:
            self._accept(required)
            return [required, *self._forced()]
        self.mask[:] = 0
        self.mask[required // 32] = 1 << required % 32
        publish_mask(self.mask)
        return []

    def write_mask(self) -> None:
        """Called by the writer."""
        words = self.mask[:-1]
        try:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self.error = str(self._matcher.get_error())
            elif self._allowed is not None:
                words &= self._allowed[:-1]
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.error is not None:
            words[:] = 0  # llguidance would allow an end here, as if the answer were whole
        publish_mask(self.mask)

    def _accept(self, token: int) -> bool:
        """Moves past a token; False where it is to be replaced by the first of `_end`."""
        matcher = self._matcher
        looks = self._completes and self._look_in <= 1
        if looks:
            matcher = matcher.deep_copy()
        if not matcher.consume_token(token):
            self.error = str(matcher.get_error()) or f"token {token} does not fit the grammar"
            return True
        guess = self._end[1:] if self._end[:1] == (token,) else self._end
        end: Sequence[int] | None = guess
        if looks and not matcher.is_stopped():
            end = self._end_after(matcher, guess, self._left - 1)
            if end is None and self._finds_way_out():
                self.steered = True
                return False
        self._matcher = matcher
        self._end = guess if end is None else end
        self._left -= 1
        self._before_stop -= 1
        if looks:
            self._look_in = LOST if end is None else self._patience()
        else:
            self._look_in -= 1
        self.finished = bool(matcher.is_stopped())
        self.mask_is_due = True
        self.mask[-1] = 0
        return True

    def _finds_way_out(self) -> bool:
        """Whether the state before the token has an end that fits, which `_end` is then."""
        end = self._end_after(self._matcher, self._end, self._left)
        if end:
            self._end = end
        return bool(end)

    def _end_after(self, matcher: Any, guess: Sequence[int], room: int) -> tuple[int, ...] | None:
        """An end of at most `room` tokens."""
        if len(guess) <= room and self._completer.ends_with(matcher, list(guess)):
            return tuple(guess)
        end = self._completer.quick(matcher, room)
        return None if end is None else tuple(end)

    def _patience(self) -> int:
        """Tokens until room may be short, if each lengthens the end by all it can."""
        return max(1, (self._left - len(self._end)) // (self._growth + 1))

    def _forced(self) -> list[int]:
        """The run of tokens that the grammar leaves no choice about, up to the answer's end."""
        run: list[int] = []
        while self._jumps and self._left and not (self.finished or self.error):
            forced = self._matcher.compute_ff_tokens()
            if not forced:
                break
            token = int(forced[0])
            if not self._accept(token):
                token = self._end[0]
                self._accept(token)
            run.append(token)
            if token in self._stop_token_ids and self._before_stop < 0:
                break
        return run


class MaskWriter:
    """A thread that writes masks while steps run."""

    def __init__(self) -> None:
        self._guides: queue.SimpleQueue[Sequence[Guide] | None] = queue.SimpleQueue()
        self._written = threading.Event()
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def write(self, guides: Sequence[Guide]) -> None:
        """Returns at once; each guide's mask is published when it is ready."""
        for guide in guides:
            guide.mask_is_due = False
        if guides:
            self._guides.put(guides)

    def wait(self, timeout_s: float) -> None:
        """Until something has been written since the last wait."""
        self._written.wait(timeout_s)
        self._written.clear()

    def close(self) -> None:
        self._guides.put(None)

    def _run(self) -> None:
        while (guides := self._guides.get()) is not None:
            for guide in guides:
                guide.write_mask()
                self._written.set()
