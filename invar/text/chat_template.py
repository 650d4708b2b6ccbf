"""Chat templates: conversations to prompts, in text or straight to token ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from invar.text.chat_messages import (
    arguments_as_text,
    content_as_parts,
    content_as_text,
    normal_messages,
    plain_copy,
)
from invar.text.content_shield import ContentShield, strings_in
from invar.text.errors import ChatTemplateError, TemplateLimit, TemplateRefusal
from invar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from invar.text.template_sandbox import SandboxedTemplate

__all__ = ["ChatTemplate", "ChatTemplateError", "require_template"]

Message = Mapping[str, Any]

_OWN_VARIABLES = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
        *("raise_exception", "strftime_now", "range"),
    )
)
_PROBE = "invarprobe"


class ChatTemplate:
    """One model's template, compiled once. Rendering is a pure function of its arguments.

    The date is the one thing a template may take from outside; `now` pins it.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = "",
        eos_token: str | None = "",
        tool_source: str | None = None,
    ) -> None:
        """`tool_source`: the variant to use when tools are given, where a model has two."""
        self.source = source
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        # Loaded with the first template, since jinja2 takes its time and base models have none.
        from invar.text.template_sandbox import SandboxedTemplate

        self._plain = _Layouts(SandboxedTemplate(source))
        self._with_tools = (
            self._plain if tool_source is None else _Layouts(SandboxedTemplate(tool_source))
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], name: str | None = None) -> ChatTemplate | None:
        """The file's template, or None where it has none (base models).

        `name` picks a variant (`tokenizer.chat_template.<name>`); by default the plain template,
        and the variant `tool_use` for conversations with tools.
        """
        key = "tokenizer.chat_template"
        source = _template_text(metadata, key if name is None else f"{key}.{name}")
        tool_source = _template_text(metadata, f"{key}.tool_use") if name is None else None
        if name is not None and source is None:
            known = sorted(k.removeprefix(key + ".") for k in metadata if k.startswith(key + "."))
            raise ChatTemplateError(
                f"{key}.{name}: the model has no such variant "
                f"(it has: {', '.join(known) or 'none'})"
            )
        if source is None or not source.strip():
            return None
        return cls(
            source,
            bos_token=_spelling(metadata, "bos_token_id"),
            eos_token=_spelling(metadata, "eos_token_id"),
            tool_source=tool_source,
        )

    @classmethod
    def from_hf(cls, files: Mapping[str, Any]) -> ChatTemplate | None:
        """From chat_template.jinja, else from tokenizer_config.json; None if neither has one."""
        from invar.text.hf_tokenizer import token_spelling

        given = files.get("tokenizer_config.json", {}).get("chat_template")
        named: dict[Any, Any] = {"default": given}
        if isinstance(given, list):
            entries = [entry for entry in given if isinstance(entry, dict)]
            named = {entry.get("name"): entry.get("template") for entry in entries}
        if "chat_template.jinja" in files:
            named["default"] = files["chat_template.jinja"]
        key = "tokenizer_config.json: chat_template"
        source, tool_source = (_template_text(named, name, key) for name in ("default", "tool_use"))
        if source is None or not source.strip():
            return None
        bos, eos = (token_spelling(files, name) for name in ("bos_token", "eos_token"))
        return cls(source, bos_token=bos, eos_token=eos, tool_source=tool_source)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: datetime | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. Raises ChatTemplateError, with the template's own sentence if it has.

        `continue_final_message` leaves the last message open, for the model to go on with; it takes
        the place of the generation prompt. `kwargs` are variables for the template.
        """
        conversation = _Conversation(messages, tools, kwargs)
        return self._render(conversation, add_generation_prompt, continue_final_message, now)

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], /, **options: Any
    ) -> npt.NDArray[np.int32]:
        """The prompt as token ids, int32 `[tokens]`; options as in `encode_with_text`."""
        return self.encode_with_text(tokenizer, messages, **options)[1]

    def encode_with_text(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: datetime | None = None,
        **kwargs: Any,
    ) -> tuple[str, npt.NDArray[np.int32]]:
        """The prompt as text and as token ids, int32 `[tokens]`, from one rendering.

        Text of messages, tools and kwargs never becomes a special token, also not where it spells
        one. An assistant's text keeps the markers that the template itself looks for in it, such as
        `</think>`. BOS is added if the model wants one and the template has not written it.
        """
        conversation = _Conversation(messages, tools, kwargs)
        layouts = self._layouts(conversation)
        shield = ContentShield(
            tokenizer.marker_spellings, [*conversation.strings(), layouts.template.source]
        )
        whole = layouts.searched_markers(tokenizer)
        conversation.guard(shield, whole)
        rendered = self._render(conversation, add_generation_prompt, continue_final_message, now)
        ids = tokenizer.encode_shielded(rendered, shield.character)
        bos = tokenizer.bos_token_id
        if tokenizer.add_bos and bos is not None and (len(ids) == 0 or ids[0] != bos):
            ids = np.concatenate((np.array([bos], dtype=np.int32), ids))
        return rendered.replace(shield.character, ""), ids

    def _layouts(self, conversation: _Conversation) -> _Layouts:
        return self._plain if conversation.tools is None else self._with_tools

    def _render(
        self,
        conversation: _Conversation,
        add_generation_prompt: bool,
        continue_final_message: bool,
        now: datetime | None,
    ) -> str:
        layouts = self._layouts(conversation)
        variables = {
            **self._special,
            **conversation.kwargs,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        messages = layouts.fitted(conversation.messages)
        rendered = layouts.run(messages, conversation.tools, variables, now)
        return _left_open(rendered, messages[-1]) if continue_final_message else rendered


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, or the error that says how to supply one; none is ever guessed."""
    if template is None:
        raise ChatTemplateError(
            "this model has no chat template, so it cannot chat. Give it a jinja2 template that "
            "suits it (--chat-template FILE, LLM(chat_template=…)), or use plain completions"
        )
    return template


class _Conversation:
    """What a request brings to a template, as plain JSON values of its own."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        reserved = sorted(_OWN_VARIABLES & kwargs.keys())
        if reserved:
            raise ChatTemplateError(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set there; use the "
                "request's own fields"
            )
        try:
            self.messages = normal_messages(messages)
            self.tools: list[Any] | None = plain_copy(list(tools), "tools") if tools else None
            self.kwargs: dict[str, Any] = plain_copy(kwargs, "chat_template_kwargs")
        except RecursionError as error:
            raise ChatTemplateError(
                "messages, tools or chat_template_kwargs are nested too deeply; send flatter values"
            ) from error

    def strings(self) -> list[str]:
        return [*strings_in(self.messages), *strings_in(self.tools), *strings_in(self.kwargs)]

    def guard(self, shield: ContentShield, whole: frozenset[str]) -> None:
        """Shield every string; `whole` spellings stay in what the assistant wrote."""

        def guard_answer(text: str) -> str:
            return shield.guard(text, whole)

        def guarded(value: Any, change: Callable[[str], str]) -> Any:
            return plain_copy(value, "", change)

        self.messages = [
            guarded(message, guard_answer if message["role"] == "assistant" else shield.guard)
            for message in self.messages
        ]
        self.tools = guarded(self.tools, shield.guard)
        self.kwargs = guarded(self.kwargs, shield.guard)


def firefunction_variables(tools: list[Any] | None, now: datetime | None) -> dict[str, str]:
    """Tools as a text, and the time: what Firefunction's template asks for.

    https://github.com/ggml-org/llama.cpp/blob/b6000/common/chat.cpp (firefunction_v2)
    """
    time = now or datetime.now(UTC)
    return {
        "functions": json.dumps(tools, indent=2, ensure_ascii=False) if tools else "",
        "datetime": f"{time:%b %d %Y %H:%M:%S} GMT",
    }


class _Layouts:
    """A template with what has been found out about the forms of input it can read."""

    def __init__(self, template: SandboxedTemplate) -> None:
        self.template = template

    def fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with content as text or as parts, whichever the template reads."""
        if any(isinstance(message["content"], list) for message in messages):
            return messages if self._reads_parts else content_as_text(messages)
        return messages if self._reads_text else content_as_parts(messages)

    def searched_markers(self, tokenizer: Tokenizer) -> frozenset[str]:
        """Special tokens the template looks for in content; never one that ends a turn."""
        ends = {tokenizer.token_text(token_id) for token_id in tokenizer.stop_token_ids}
        return (self._searched_constants & tokenizer.marker_spellings) - ends

    def run(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
        now: datetime | None,
    ) -> str:
        """Render, trying in turn the forms that differ between families of templates."""
        base = {**variables, "messages": messages, "tools": tools}
        attempts = [base]
        if any("tool_calls" in message for message in messages):
            attempts.append({**base, "messages": arguments_as_text(messages)})
        if tools is None:
            # Some loop over `tools` unasked: an undefined variable is empty, None is not.
            attempts.append({name: value for name, value in base.items() if name != "tools"})
        if "functions" in self.template.source:
            attempts.append({**firefunction_variables(tools, now), **base})
        first_error: Exception | None = None
        for attempt in attempts:
            try:
                return self.template.render(attempt, now=now)
            except TemplateRefusal as refusal:
                raise ChatTemplateError(
                    f"the chat template refuses this conversation: {refusal}"
                ) from refusal
            except TemplateLimit as limit:
                raise ChatTemplateError(f"the chat template failed: {limit}") from limit
            except Exception as error:  # a template is foreign code and may raise anything
                first_error = first_error or error
        assert first_error is not None
        raise ChatTemplateError(
            f"the chat template failed: {type(first_error).__name__}: {first_error}"
        ) from first_error

    @functools.cached_property
    def _searched_constants(self) -> frozenset[str]:
        return self.template.searched_constants()

    @functools.cached_property
    def _reads_text(self) -> bool:
        # Unless parts are proven to be the only form, content stays text.
        return _PROBE in self._probe(_PROBE) or not self._reads_parts

    @functools.cached_property
    def _reads_parts(self) -> bool:
        rendered = self._probe([{"type": "text", "text": _PROBE}])
        shown_as_data = "'type'" in rendered or '"type"' in rendered
        return _PROBE in rendered and not shown_as_data

    def _probe(self, content: Any) -> str:
        variables = {"bos_token": "", "eos_token": "", "add_generation_prompt": False}
        try:
            message = {"role": "user", "content": content}
            return self.run([message], None, variables, datetime(2024, 1, 1))
        except ChatTemplateError:
            return ""


def _left_open(rendered: str, final_message: Mapping[str, Any]) -> str:
    """The prompt up to the end of the final message's text, without what closes its turn."""
    content = final_message["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = texts[-1] if texts and isinstance(texts[-1], str) else ""
    stripped = content.strip()
    start = rendered.rfind(stripped) if stripped else -1
    if start < 0:
        raise ChatTemplateError(
            "continue_final_message: the final message's text is not in the rendered prompt, so "
            "there is nothing to continue; send it with text, and as the last message"
        )
    ending = content[len(content.rstrip()) :]
    end = start + len(stripped)
    # Templates that trim content have dropped its trailing blanks; others kept them.
    return rendered[: end + len(ending)] if rendered.startswith(ending, end) else rendered[:end]


def _template_text(metadata: Mapping[str, Any], key: str, called: str | None = None) -> str | None:
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ChatTemplateError(
        f"{called or key}: expected a jinja2 template as a string, found {type(value).__name__} "
        f"{str(value)[:60]}; give the model one with --chat-template FILE, LLM(chat_template=…)"
    )


def _spelling(metadata: Mapping[str, Any], name: str) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{name}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(token_id, int | np.integer) or not isinstance(tokens, Sequence):
        return ""
    return str(tokens[int(token_id)]) if 0 <= token_id < len(tokens) else ""
