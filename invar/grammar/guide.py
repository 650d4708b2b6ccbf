"""A request's way through its grammar: masks, forced tokens, and an end before the limit.

Thoughts come before the grammar, and are ended where their budget is used up or where the shortest
answer would not fit behind them any more (`Thoughts`, `invar.grammar.thoughts`).

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
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from invar._native import publish_mask
from invar.grammar.compiler import CompiledGrammar, GrammarVocabulary, reason_of
from invar.grammar.completion import DeadEnd
from invar.grammar.thoughts import BLANK, Phase, Rules, Thinking, Thoughts

Mask = npt.NDArray[np.uint32]

GROWTH = 16  # tokens by which one may lengthen the shortest end, beside those of a whole answer
# Tokens that are appended at once. What is forced is told up to its end each time that it is asked
# for: of a longer run (nobody's but `a{60000}`) tokens are drawn, to the same answer.
LONGEST_RUN = 512
SLOW_MASK_S = 0.005  # of a core; usual ones take 0.02 ms to 1 ms
LOST = 8  # tokens until an end is looked for again where there was none


MaskQueue: TypeAlias = "queue.SimpleQueue[Sequence[Guide] | None]"


class Guide:
    """Of one request. Its engine's thread and a `MaskWriter` take turns at it: from
    `mask_is_due` to a mask that is ready it belongs to the writer."""

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        vocab_size: int,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        allowed: Mask | None = None,
        completes: bool = True,
        jumps: bool = True,
        thoughts: Thoughts | None = None,
        vocabulary: GrammarVocabulary | None = None,
    ) -> None:
        """allowed: a mask that holds as well. completes: lead the answer to an end before
        `max_tokens`. jumps: forced tokens come without being drawn. thoughts: the grammar begins
        behind them; without one they alone are guided, and `vocabulary` is needed."""
        self._grammar = grammar
        self._matcher: Any = None if grammar is None else grammar.matcher()
        # Behind thoughts an answer may begin with what was left of their last token.
        self._place = None if grammar is None or thoughts is not None else grammar.masks.start
        self._allowed = allowed
        self._left = max_tokens
        self._before_stop = min_tokens
        self._stop_token_ids = stop_token_ids
        self._jumps = jumps
        # uint32 [words + 1], as `SamplingBatch.masks` has them.
        self._written: Mask = np.zeros(-(-vocab_size // 32) + 1, np.uint32)
        self._words = self._written[:-1]
        self._address, self._num_bytes = self._words.ctypes.data, self._words.nbytes
        self.is_slow = False  # its last mask took long
        self.mask_is_due = False  # it is not the mask of the next token, and nobody writes it
        self._drawn_anyway = 0  # tokens before it is looked at again what is forced
        self.finished = False  # the answer is whole and nothing can follow
        self.steered = False  # a token was replaced, or thoughts were ended, for want of room
        self.error: str | None = None
        self.is_broken = False  # the error is not the grammar's but of the code that follows it
        end = None if grammar is None else grammar.end
        closing = 0
        if thoughts is not None:
            vocabulary = vocabulary if grammar is None else grammar.vocabulary
            assert vocabulary is not None
            closing = thoughts.longest_closing(vocabulary.raw)
        if grammar is not None and end is not None and closing + len(end) > max_tokens:
            end = grammar.shortest
        self._completes = completes and end is not None
        self._end: Sequence[int] = end or ()  # of the state when it was last looked at
        self._whole_end = self._end
        self._growth = GROWTH + max(len(self._end), grammar.longest_branch if grammar else 0)
        self._look_in = self._patience()
        self._thinking: Thinking | None = None
        self._unguided: Mask | None = allowed  # of what the grammar has no say about
        self._blank_ids: list[int] = []
        if thoughts is not None and vocabulary is not None:
            room = max_tokens - len(self._end) if self._completes else None
            self._thinking = Rules(thoughts, vocabulary.raw, room).begin()
            self.steered = self._thinking.was_cut
            if grammar is not None:
                self._blank_ids = vocabulary.raw.spelt(b"\n", b"\n\n")
                self._unguided = _without(vocabulary.stop_ids, vocab_size, allowed)
        self._step()

    @property
    def mask(self) -> Mask | None:
        """Of the next token. None: it is drawn as if there were no grammar."""
        return self._written if self._is_guided else self._unguided

    @property
    def is_ready(self) -> bool:
        return not self._is_guided or bool(self._written[-1])

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
        required = self._accept(token)
        if required is None:
            return [token] if self._stops_at(token) else [token, *self._forced()]
        if self._jumps:
            self._accept(required)
            return [required, *self._forced()]
        self._write_only(required)
        return []

    def write_mask(self) -> None:
        """Called by the writer."""
        words = self._words
        try:
            place = self._place
            if self._matcher is None:
                words[:] = 0
            elif place is not None and (known := place.mask) is not None:
                words[:] = known
            else:
                self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
                if self._matcher.is_error():
                    self.error = reason_of(self._matcher)
                elif place is not None:
                    place.keep(words)
            for token in self._beside():
                words[token // 32] |= np.uint32(1 << token % 32)
            if self._allowed is not None:
                words &= self._allowed[:-1]
        except Exception as error:
            self.error, self.is_broken = f"{type(error).__name__}: {error}", True
        if self.error is not None:
            words[:] = 0  # llguidance would allow an end here, as if the answer were whole
        publish_mask(self._written)

    def _write_only(self, token: int) -> None:
        self._is_guided = True
        self._written[:] = 0
        self._written[token // 32] = 1 << token % 32
        publish_mask(self._written)

    def _step(self) -> None:
        """What the next mask is."""
        thinking, self._is_guided, self.mask_is_due = self._thinking, True, False
        if thinking is not None and thinking.closing:
            self._write_only(thinking.closing[0])
        elif self._grammar is None or (thinking is not None and thinking.phase is Phase.THINKING):
            self._is_guided = False
        else:
            self._written[-1] = 0
            self.mask_is_due = True

    def _beside(self) -> list[int]:
        """Tokens that may come although the grammar does not know them."""
        thinking = self._thinking
        if thinking is None:
            return []
        if thinking.phase is Phase.ENDED:
            return self._blank_ids if len(self._end) < self._left else []
        return [] if thinking.start_id is None else [thinking.start_id]

    def _accept(self, token: int) -> int | None:
        """Moves past a token; or stays, where another is to come in its place: that one."""
        required = self._follow(token) if self._thinking is None else self._think(token)
        if required is None:
            self._left -= 1
            self._before_stop -= 1
            self._step()
        return required

    # ------------------------------------------------------------------------------ thoughts

    def _think(self, token: int) -> int | None:
        """`_accept` before the answer has begun."""
        before, grammar = self._thinking, self._grammar
        assert before is not None
        if before.phase is Phase.ENDED:
            self._thinking = None
            is_blank = token in self._blank_ids and not self._matcher_takes([token])
            return None if is_blank else self._follow(token)
        after = before.after(token)
        if after.phase is Phase.NONE:
            self._thinking = None
            return None if grammar is None else self._follow(token)
        if after.phase is Phase.OPENING and grammar is not None:
            # What begins so may be the answer all the same.
            if self._matcher is not None and not self._matcher.try_consume_tokens([token]):
                self._matcher = None
            self._end = self._guess(token)
        elif after.phase is Phase.ENDED and grammar is not None:
            self._matcher, self._end = grammar.matcher(), self._whole_end
            rest = after.rest if after.is_opener else after.rest.lstrip(BLANK)
            ids = grammar.vocabulary.raw.marked(rest.decode("utf-8", "replace"))
            if self._matcher_takes(ids):
                self._matcher.try_consume_tokens(ids)
                for one in ids:
                    self._end = self._guess(one)
            elif after.is_opener:
                after = after.going_on()
            else:
                # The token of the end itself, without the rest.
                piece = grammar.vocabulary.raw.tokens[token]
                return grammar.vocabulary.raw(piece[: len(piece) - len(after.rest)])[0]
            if rest and after.phase is Phase.ENDED:
                after = replace(after, phase=Phase.NONE)
        self.steered |= after.was_cut
        is_over = after.phase is Phase.NONE or (after.phase is Phase.ENDED and grammar is None)
        self._thinking = None if is_over else after
        if after.phase in (Phase.ENDED, Phase.NONE):
            self._look_in = self._patience(1)
            self.finished = bool(self._matcher is not None and self._matcher.is_stopped())
        return None

    def _matcher_takes(self, tokens: list[int]) -> bool:
        return bool(self._matcher.validate_tokens(tokens) == len(tokens))

    # ------------------------------------------------------------------------------- answers

    def _follow(self, token: int) -> int | None:
        """`_accept` in the grammar: the first of `_end` is to come where a token leaves no room."""
        matcher = self._matcher
        if matcher is None:
            return None
        looks = self._completes and self._look_in <= 1
        if looks:
            matcher = matcher.deep_copy()
        if not matcher.consume_token(token):
            self.error = reason_of(matcher) or f"token {token} does not fit the grammar"
            return None
        guess = self._guess(token)
        end: Sequence[int] | None = guess
        if looks and not matcher.is_stopped():
            end = self._end_after(matcher, guess, self._left - 1)
            if end is None and self._finds_way_out():
                self.steered = True
                return self._end[0]
        self._matcher = matcher
        self._place = None if self._place is None else self._place.after(token)
        self._end = guess if end is None else end
        if looks:
            self._look_in = LOST if end is None else self._patience(1)
        else:
            self._look_in -= 1
        self.finished = bool(matcher.is_stopped())
        return None

    def _guess(self, token: int) -> Sequence[int]:
        """What of the end is left after a token, if that was its first."""
        return self._end[1:] if self._end[:1] == (token,) else self._end

    def _finds_way_out(self) -> bool:
        """Whether the state before the token has an end that fits, which `_end` is then."""
        end = self._end_after(self._matcher, self._end, self._left)
        if end is not None:
            assert self._grammar is not None
            self._end = end or (self._grammar.completer.eos_id,)
        return end is not None

    def _end_after(self, matcher: Any, guess: Sequence[int], room: int) -> tuple[int, ...] | None:
        """An end of at most `room` tokens."""
        assert self._grammar is not None
        completer = self._grammar.completer
        if len(guess) <= room and completer.ends_with(matcher, list(guess)):
            return tuple(guess)
        with suppress(DeadEnd):
            end = completer.quick(matcher, room)
            return None if end is None else tuple(end)
        return None

    def _patience(self, taken: int = 0) -> int:
        """Tokens until room may be short, if each lengthens the end by all it can."""
        return max(1, (self._left - taken - len(self._end)) // (self._growth + 1))

    def _forced(self) -> list[int]:
        """The run of tokens that there is no choice about, up to the answer's end."""
        run: list[int] = []
        while self._jumps and self._left and not (self.finished or self.error):
            token = self._next_forced()
            if token is None:
                break
            required = self._accept(token)
            if required is not None:
                token = required
                self._accept(token)
            run.append(token)
            if self._stops_at(token):
                break
        return run

    def _stops_at(self, token: int) -> bool:
        """Whether the answer ends with the token, which has been accepted."""
        return token in self._stop_token_ids and self._before_stop < 0

    def _next_forced(self) -> int | None:
        thinking = self._thinking
        if thinking is not None and thinking.closing:
            return thinking.closing[0]
        if self._matcher is None or (thinking is not None and not self._has_begun(thinking)):
            return None
        if self._drawn_anyway:
            self._drawn_anyway -= 1
            return None
        forced = self._matcher.compute_ff_tokens()
        if len(forced) > LONGEST_RUN:
            self._drawn_anyway = len(forced) - LONGEST_RUN
            return None
        return int(forced[0]) if forced else None

    def _has_begun(self, thinking: Thinking) -> bool:
        """Whether nothing but the grammar says what may come."""
        return thinking.phase is not Phase.THINKING and not self._beside()


def _without(stop_ids: Collection[int], vocab_size: int, allowed: Mask | None) -> Mask:
    """A mask that leaves out what ends a text, which an answer in thoughts must not."""
    words: Mask = np.full(-(-vocab_size // 32) + 1, 0xFFFFFFFF, np.uint32)
    if vocab_size % 32:
        words[-2] = (1 << vocab_size % 32) - 1
    for one in stop_ids:
        if one < vocab_size:
            words[one // 32] &= ~np.uint32(1 << one % 32)
    if allowed is not None:
        words &= allowed
    words[-1] = 1
    return words


class MaskWriter:
    """Writes masks while steps run: two threads, so that nobody waits behind a mask that takes
    long. Which of them writes changes no mask."""

    def __init__(self) -> None:
        self._quick: MaskQueue = queue.SimpleQueue()
        self._slow: MaskQueue = queue.SimpleQueue()
        self._written = threading.Event()
        for guides in (self._quick, self._slow):
            threading.Thread(target=self._run, args=(guides,), name="masks", daemon=True).start()

    def write(self, guides: Sequence[Guide]) -> None:
        """Returns at once; each guide's mask is published when it is ready."""
        for guide in guides:
            guide.mask_is_due = False
        for slow, waiting in ((False, self._quick), (True, self._slow)):
            if found := [guide for guide in guides if guide.is_slow is slow]:
                waiting.put(found)

    def wait(self, timeout_s: float) -> None:
        """Until something has been written since the last wait."""
        self._written.wait(timeout_s)
        self._written.clear()

    def close(self) -> None:
        self._quick.put(None)
        self._slow.put(None)

    def _run(self, waiting: MaskQueue) -> None:
        while (guides := waiting.get()) is not None:
            for guide in guides:
                began = time.thread_time()
                guide.write_mask()
                guide.is_slow = time.thread_time() - began > SLOW_MASK_S
                self._written.set()
