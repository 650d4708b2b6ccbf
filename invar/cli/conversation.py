"""A conversation with an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from invar.engine.sampling_params import SamplingParams
from invar.grammar.thoughts import Thoughts
from invar.outputs import assembler
from invar.serving.choice import Choice

if TYPE_CHECKING:
    from invar.engine.loader import LoadedModel


class AnswerError(Exception):
    """This answer failed; the conversation can go on."""


class Conversation:
    """Turns so far, and how the next answer is drawn."""

    def __init__(
        self, loaded: LoadedModel, params: SamplingParams, *, system: str | None, raw: bool
    ) -> None:
        """``raw``, or a model without template: each prompt is a text to go on with.

        Raises ValueError for parameters that this model cannot be asked with.
        """
        self._loaded = loaded
        self._ready = loaded.door.prepare(params)
        self.warnings = self._ready.warnings
        self._system = system
        self._count = 0
        self.chats = loaded.chat_template is not None and not raw
        self.clear()
        if system is not None and not self.chats:
            raise ValueError("--system needs a model with a chat template (and no --raw)")

    def clear(self) -> None:
        self._messages: list[dict[str, Any]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def answer(self, text: str, is_stopped: Callable[[], bool]) -> Iterator[str]:
        """The answer piece by piece, up to its end or until ``is_stopped()`` between two steps.

        What was said counts as said, also when it was stopped. Raises AnswerError.
        """
        self._messages.append({"role": "user", "content": text})
        said = ""
        try:
            for piece in self._generate(text, is_stopped):
                said += piece
                yield piece
        except ValueError as error:
            # The prompt does not fit or cannot be written: as if it had not been said.
            self._messages.pop()
            raise AnswerError(str(error)) from None
        self._messages.append({"role": "assistant", "content": said})

    def _generate(self, text: str, is_stopped: Callable[[], bool]) -> Iterator[str]:
        loaded, engine = self._loaded, self._loaded.engine
        self._count += 1
        prompt = self._prompt(text)
        (request,) = loaded.door.resolve(
            f"run-{self._count}", prompt, self._ready, thoughts=self._thoughts(prompt)
        )
        choice = Choice(0, assembler(loaded.tokenizer, request, self._ready.params, not self.chats))
        engine.add_request(request)
        try:
            while not is_stopped():
                for output in engine.step():
                    delta, _ = choice.take(output)
                    if delta.error is not None:
                        raise AnswerError(delta.error)
                    yield delta.text
                    if delta.finish_reason is not None:
                        return
        finally:
            engine.abort(request.id)

    def _thoughts(self, prompt: Any) -> Thoughts | None:
        """Those that may stand before the answer, where they count."""
        is_bounded = self._ready.params.thinking_token_budget is not None
        counts = is_bounded or (self.chats and self._ready.grammar is not None)
        replies = self._loaded.replies if counts else None
        end = self._loaded.tokenizer.decode_end(prompt) if counts else ""
        return None if replies is None else replies.thoughts(end)

    def _prompt(self, text: str) -> Any:
        tokenizer, template = self._loaded.tokenizer, self._loaded.chat_template
        if self.chats and template is not None:
            return template.encode(tokenizer, self._messages)
        return tokenizer.encode(text)
