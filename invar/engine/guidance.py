"""Grammars in the engine: requests wait for theirs to be compiled, masks are written beside steps.

A request with a grammar, or with a budget of thoughts, is with the engine and not yet with the
scheduler until it has a `Guide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

from invar.engine import failures
from invar.engine.constraints import Constraints
from invar.engine.failures import Failure
from invar.engine.state import Chunk, RequestState
from invar.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarError, GrammarVocabulary
from invar.grammar.guide import Guide, MaskWriter

Compiling: TypeAlias = Future[CompiledGrammar] | Future[GrammarVocabulary]

WAIT_S = 0.005  # for a grammar or a mask, where nobody has anything to run


class Guidance:
    """Belongs to the engine's thread."""

    def __init__(self, grammars: GrammarCompiler | None, vocab_size: int, *, jumps: bool) -> None:
        """jumps: forced tokens come without being drawn; the answer is the same."""
        self.grammars = grammars
        self.compiling: dict[str, tuple[RequestState, Compiling]] = {}
        self._vocab_size = vocab_size
        self._jumps = jumps
        self._writer: MaskWriter | None = None

    def begin(self, state: RequestState) -> None:
        """Has the request's grammar compiled. Raises ValueError where that cannot be."""
        grammar = state.request.sampling.grammar
        if self.grammars is None:
            raise ValueError(f"request {state.request.id}: this engine compiles no grammars")
        compiling: Compiling = (
            self.grammars.read_vocabulary() if grammar is None else self.grammars.compile(grammar)
        )
        self.compiling[state.request.id] = state, compiling

    def ready(self) -> Iterator[tuple[RequestState, Failure | None]]:
        """Requests whose grammar is compiled; they have a guide, or have failed."""
        for state, future in [one for one in self.compiling.values() if one[1].done()]:
            del self.compiling[state.request.id]
            error = future.exception()
            if error is None:
                self._guide(state, future.result())
                yield state, failures.of_guide(state)
            else:
                refused = isinstance(error, GrammarError)
                yield state, Failure(f"structured_outputs: {error}", refused)

    def _guide(self, state: RequestState, compiled: CompiledGrammar | GrammarVocabulary) -> None:
        request = state.request
        sampling = request.sampling
        # Whatever else bends a draw decides about forced tokens as about any other.
        jumps = self._jumps and not (
            sampling.bias or sampling.bad_sequences or sampling.allowed_token_ids
        )
        state.constraints = Constraints.of(request, self._vocab_size)
        grammar = compiled if isinstance(compiled, CompiledGrammar) else None
        vocabulary = compiled if isinstance(compiled, GrammarVocabulary) else None
        guide = state.guide = Guide(
            grammar,
            self._vocab_size,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            allowed=state.constraints.mask,
            completes=sampling.completes_grammar,
            jumps=jumps,
            thoughts=sampling.thoughts,
            vocabulary=vocabulary,
        )
        state.append(guide.replay(state.output_token_ids.tolist()))
        guide.steered |= request.was_steered

    def write_masks(self, chunks: Sequence[Chunk]) -> None:
        """Has those written that the draws of a step look at; the step need not wait for it."""
        guides = [chunk.state.guide for chunk in chunks if chunk.samples]
        due = [guide for guide in guides if guide is not None and guide.mask_is_due]
        if due:
            if self._writer is None:
                self._writer = MaskWriter()
            self._writer.write(due)

    def wait(self) -> None:
        """Where no request can run: for a mask, or a moment for a grammar."""
        if self._writer is not None and not self.compiling:
            self._writer.wait(WAIT_S)
        elif self.compiling:
            _, future = next(iter(self.compiling.values()))
            with suppress(TimeoutError):
                future.exception(WAIT_S)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
