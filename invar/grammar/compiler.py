"""Normalised grammars to matchers: compiled beside whoever asks, within limits, and kept."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from invar.grammar.completion import CONTROL, MAX_TOKENS, Completer, DeadEnd
from invar.grammar.shared_masks import SharedMasks
from invar.grammar.structural_tag import Hints
from invar.grammar.vocabulary import RawVocabulary, TokenSource

# Rules that name each other in a chain are read by recursion: a text of the longest length that is
# accepted needs some 100 MB of it. It is address space, not memory.
STACK_BYTES = 512 << 20
COMPILING_AT_ONCE = 2
# One that has taken so long steps aside for those that wait, up to so many.
SLOW_S = 0.5
SLOW_AT_ONCE = 6
COMPILE_LIMIT_S = 10.0
# Reading takes the square of this: 2 s of a core at 50,000, 13 s where llguidance's own limit ends
# it (8,000 optional properties). Its other limits bound what a step may cost.
MAX_SYMBOLS = 30_000
END_LIMIT_S = 2.0  # of a core, to look for a short end
KEPT = 128  # grammars
REASON_CHARACTERS = 400
NO_TEXT = "no text fits it"

T = TypeVar("T")

_starting = threading.Lock()  # of threads: the size of a stack is a setting of the process


class GrammarError(ValueError):
    """A grammar that cannot be used, with the reason."""


@dataclass(frozen=True)
class GrammarVocabulary:
    """A model's vocabulary in the forms that grammars need."""

    raw: RawVocabulary
    tokenizer: Any  # LLTokenizer
    completer: Completer
    stop_ids: frozenset[int]  # tokens that end a text


@dataclass(frozen=True)
class CompiledGrammar:
    """A matcher before its first token; each request takes a copy."""

    start: Any  # LLMatcher
    warnings: tuple[str, ...]  # keywords that are ignored
    end: tuple[int, ...] | None  # tokens of a short answer; None: none was found
    vocabulary: GrammarVocabulary
    completer: Completer  # knows the grammar
    longest_branch: int = 0  # tokens of the longest of those short answers that it tells apart
    masks: SharedMasks = field(default_factory=SharedMasks)

    def matcher(self) -> Any:
        return self.start.deep_copy()

    def fewest_tokens(self, limit: int) -> int:
        """Of a whole answer; looked for only where `limit` may be too small. 0: not known."""
        if self.end is None or len(self.end) <= limit:
            return 0
        return len(self.shortest)

    @cached_property
    def shortest(self) -> tuple[int, ...]:
        found = None
        with suppress(DeadEnd):
            found = self.completer.shortest(self.start)
        return tuple(found) if found is not None else self.end or ()


class GrammarCompiler:
    """Of one vocabulary. Threads may share it."""

    def __init__(self, load: Callable[[], TokenSource], vocab_size: int) -> None:
        """load: gives the tokenizer, asked for with the first grammar. vocab_size: ids that can be
        sampled."""
        self.load = load
        self.vocab_size = vocab_size
        self._vocabulary: GrammarVocabulary | None = None
        self._reading = threading.Lock()
        self._lanes = Lanes(COMPILING_AT_ONCE, SLOW_AT_ONCE, SLOW_S)
        self._known: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether `check` answers at once."""
        known = self._known.get(grammar)
        return known is not None and known.done()

    def check(self, grammar: str) -> CompiledGrammar:
        """Waits for the grammar. Raises GrammarError."""
        try:
            return self.compile(grammar).result(COMPILE_LIMIT_S)
        except FutureTimeout:
            raise GrammarError(f"it takes more than {COMPILE_LIMIT_S:g} s to compile") from None

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """Returns at once; the future raises GrammarError."""
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known
            future: Future[CompiledGrammar] = Future()
            self._known[grammar] = future
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        start_thread(lambda: self._compile_into(future, grammar), "grammar")
        return future

    def read_vocabulary(self) -> Future[GrammarVocabulary]:
        """`vocabulary` beside whoever asks."""
        future: Future[GrammarVocabulary] = Future()
        if self._vocabulary is not None:
            future.set_result(self._vocabulary)
        else:
            start_thread(lambda: _settle(future, self.vocabulary), "vocabulary")
        return future

    def _compile_into(self, future: Future[CompiledGrammar], grammar: str) -> None:
        def compiled() -> CompiledGrammar:
            with self._lanes.taken():
                return self._compiled(grammar)

        _settle(future, compiled)

    def _compiled(self, grammar: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self.vocabulary()
        given = json.loads(grammar)
        lark, hints = given["grammars"][0]["lark_grammar"], Hints(**given.pop("hints"))
        completer = vocabulary.completer.of_grammar(lark, hints, self.vocab_size, vocabulary.raw)
        limits = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)
        start = LLMatcher(vocabulary.tokenizer, json.dumps(given), log_level=0, limits=limits)
        if start.is_error():
            _check_tokens(lark, self.vocab_size)
        _raise_error(start)
        start.compute_bitmask()  # of the first token: what no text fits shows here
        _raise_error(start)
        try:
            branches = completer.branches(start, END_LIMIT_S)
            end = _short_end(completer, start, bool(branches))
        except TimeoutError:
            raise GrammarError("its answers are too costly to follow") from None
        shortest = min([*branches, *([] if end is None else [end])], key=len, default=None)
        return CompiledGrammar(
            start,
            tuple(start.get_grammar_warnings()),
            None if shortest is None else tuple(shortest),
            vocabulary,
            completer,
            max(map(len, branches), default=0),
        )

    def vocabulary(self) -> GrammarVocabulary:
        """Reads it where that has not been done, which takes a moment. Raises GrammarError."""
        with self._reading:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                source = self.load()
                if not source.stop_token_ids:
                    raise GrammarError("the model's tokenizer has no token that ends a text")
                raw = RawVocabulary(source)
                tokenizer = LLTokenizer(
                    TokenizerWrapper(raw),
                    n_vocab=self.vocab_size,
                    eos_token=sorted(source.stop_token_ids),
                )
                special = frozenset(raw.special_token_ids)
                completer = Completer(raw.tokens, special, raw.eos_token_id)
                self._vocabulary = GrammarVocabulary(
                    raw, tokenizer, completer, frozenset(source.stop_token_ids)
                )
            return self._vocabulary


class Lanes:
    """Room for a few that are quick, and for those that turn out to be slow."""

    def __init__(self, quick: int, slow: int, slow_s: float) -> None:
        self._quick = threading.Semaphore(quick)
        self._slow = threading.Semaphore(slow)
        self._slow_s = slow_s

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a quick lane; after `slow_s` it is free for others, if a slow one is."""
        self._quick.acquire()
        lane, changing = [self._quick], threading.Lock()

        def step_aside() -> None:
            with changing:
                if lane and self._slow.acquire(blocking=False):
                    lane.pop().release()
                    lane.append(self._slow)

        timer = threading.Timer(self._slow_s, step_aside)
        timer.daemon = True
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            with changing:
                lane.pop().release()


def _settle(future: Future[T], make: Callable[[], T]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


def _short_end(completer: Completer, start: Any, has_others: bool) -> list[int] | None:
    """has_others: there are texts that fit, whatever is found here. Raises GrammarError where none
    does, TimeoutError."""
    try:
        return completer.quick(start, MAX_TOKENS, END_LIMIT_S)
    except DeadEnd:
        if has_others:
            return None
    try:
        return completer.shortest(start)
    except DeadEnd:
        raise GrammarError(NO_TEXT) from None


def _check_tokens(lark: str, vocab_size: int) -> None:
    """What the library says of a token that is not there is no answer."""
    for one in map(int, CONTROL.findall(lark)):
        if one >= vocab_size:
            raise GrammarError(f"token {one}: the model has {vocab_size}")


def _raise_error(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(reason_of(matcher))


def reason_of(matcher: Any) -> str:
    """What a matcher's error says, for people."""
    reason = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    if "failed to compile JSON schema" in reason:
        # The lines that follow show the whole schema, but for one that may name what is wrong.
        first, *rest = reason[reason.index("failed to compile JSON schema") :].split("\n")
        named = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
        reason = " ".join([first, *named[:1]])
    if reason.startswith("NoExtension"):
        reason = NO_TEXT
    return f"{reason[:REASON_CHARACTERS]}…" if len(reason) > REASON_CHARACTERS else reason


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread of its own with room for deep recursion; it does not keep the process alive."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
