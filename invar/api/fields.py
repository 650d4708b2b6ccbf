"""The fields of a request, with their types. Ranges are checked where their meaning is known."""

from __future__ import annotations

from typing import Any

import msgspec

from invar.text.tools import Tool


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # true is refused


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions share. None means the default."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    # The form of the answer: OpenAI's name, vLLM's new and old ones, SGLang's and llama.cpp's.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # Tokens of thoughts: the names of vLLM, llama.cpp, SGLang and Qwen.
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    max_thinking_tokens: int | None = None
    thinking_budget: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """Only what is checked; the template is given the message as it came."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatFields(GenerationFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the content
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None


class CompletionFields(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def scores_only(self) -> bool:
        """The prompt is wanted with its logprobs, and no answer."""
        return bool(self.echo) and self.max_tokens == 0


class TokenizeFields(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name for the text
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
