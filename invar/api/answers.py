"""The shapes of answers, as the OpenAPI document names them. Tests hold the real ones to it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Exact(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing but its fields; one that may be missing is UNSET."""


class Tagged(Exact, tag_field="type"):
    """One of several kinds, told by its type."""


class CachedTokens(Exact):
    cached_tokens: int


class ReasoningTokens(Exact):
    reasoning_tokens: int


class Usage(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TopLogprob(Exact):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Exact):
    name: str
    arguments: str


class CalledTool(Exact):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Exact):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Exact):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


PromptLogprobs = list[dict[str, dict[str, Any]] | None] | None


class ChatCompletion(Exact):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs


class TextLogprobs(Exact):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Exact):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Exact):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class TextBlock(Tagged, tag="text"):
    text: str
    citations: None


class ThinkingBlock(Tagged, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Tagged, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Exact):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Exact):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str


class MessageTokens(Exact):
    input_tokens: int


class OutputText(Exact):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


class ReasoningText(Exact):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Tagged, tag="reasoning"):
    id: str
    status: Literal["completed", "incomplete"]
    summary: list[None]
    content: list[ReasoningText]


class FunctionCallItem(Tagged, tag="function_call"):
    id: str
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class OutputMessage(Tagged, tag="message"):
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class InputDetails(CachedTokens):
    cache_write_tokens: int


class ResponseUsage(Exact):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Exact):
    code: str
    message: str


class IncompleteDetails(Exact):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Exact):
    effort: str | None
    summary: None


class Response(Exact):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: Literal["default"]
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Exact):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Exact):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Exact):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Model(Exact):
    """OpenAI's card, with what Anthropic's clients read beside it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[None]
    type: Literal["model"]
    display_name: str
    created_at: str


class Models(Exact):
    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Tokens(Exact):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Exact):
    prompt: str
    content: str


class CacheReset(Exact):
    object: Literal["cache.reset"]
    reset: bool


class Version(Exact):
    version: str
    fingerprint: str


class Ready(Exact):
    status: Literal["ready"]


class ErrorBody(Exact):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Exact):
    """OpenAI's, on every route but /v1/messages."""

    error: ErrorBody


class MessageErrorBody(Exact):
    type: str
    message: str


class MessageError(Exact):
    """Anthropic's."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str | None
