"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_fields, parse_json, read_body
from invar.api.calls import (
    Call,
    check_stream_options,
    client_left,
    finish_fields,
    start_call,
)
from invar.api.chat import json_response
from invar.api.fields import CompletionFields
from invar.api.limits import check_n, check_range
from invar.api.logprobs import completion_logprobs, prompt_logprobs
from invar.api.prompts import TokenIds, check_fits, completion_prompts
from invar.api.sampling import choice_requests, prepare_sampling, wanted_tokens
from invar.api.server import Server
from invar.api.streams import EventStream, collect
from invar.engine.request import TokenLogprobs
from invar.serving.choice import ChoiceDelta
from invar.text.output import TextAssembler
from invar.text.tokenizer import Tokenizer

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's, also for null


async def completions(server: Server, request: Request) -> Response:
    raw = parse_json(await read_body(request, server.limits.body_bytes))
    fields = parse_fields(raw, CompletionFields, server.unknown_fields)
    server.model.check_name(fields.model)
    check_stream_options(fields)
    check_range("logprobs", fields.logprobs, 0, server.limits.logprobs)
    n = 1 if fields.n is None else fields.n
    check_n(server.limits, n, prompts=1)
    # Scoring a prompt (echo with max_tokens 0) runs one token that nobody sees.
    scores_only = bool(fields.echo) and fields.max_tokens == 0
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    max_tokens = wanted_tokens([("max_tokens", 1 if scores_only else wanted)])
    params = prepare_sampling(server, fields, fields.logprobs, max_tokens)
    specials = True if fields.add_special_tokens is None else fields.add_special_tokens
    prompts = await completion_prompts(server, fields.prompt, specials)
    check_n(server.limits, n, len(prompts))
    scores_prompt = fields.logprobs if fields.echo else None
    choices = []
    for prompt in prompts:
        check_fits(server, len(prompt), max_tokens, "prompt")
        choices += choice_requests(server, fields, params, prompt, scores_prompt=scores_prompt)
    call = start_call(server, "cmpl", fields, prompts, choices)
    writer = CompletionWriter(call, fields, scores_only)
    if fields.stream:
        return EventStream(call.generation, writer)
    answers = await collect(call.generation, len(choices), request.receive)
    if answers is None:
        return client_left()
    return json_response(writer.complete(answers))


class CompletionWriter:
    """Responses and chunks; with echo the prompt stands before the text of every choice."""

    def __init__(self, call: Call, fields: CompletionFields, scores_only: bool) -> None:
        self._call = call
        self._top = fields.logprobs
        self._wants_prompt_logprobs = fields.prompt_logprobs is not None
        self._scores_only = scores_only
        self._tokenizer = call.server.model.tokenizer
        self._echoes = [Echo(self._tokenizer, p) for p in call.prompts] if fields.echo else []
        self._unopened = set(range(len(self._echoes) * call.n))

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            choice = self._choice(answer)
            if self._wants_prompt_logprobs and answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, answer.prompt_logprobs)
            choices.append(choice)
        return self._call.envelope(KIND, choices) | {"usage": self._call.usage.as_json()}

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
        return [
            self._call.chunk(KIND, self._choice(delta))
            for delta in deltas
            if delta.text
            or delta.finish_reason is not None
            or delta.index in self._unopened
            or (self._top is not None and delta.logprobs)
        ]

    def closing(self) -> list[dict[str, Any]]:
        return self._call.closing(KIND)

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        if self._scores_only:
            delta.text, delta.token_ids, delta.token_offsets, delta.logprobs = "", [], [], []
        self._call.usage.take([delta])
        text, token_ids = delta.text, delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        offsets = delta.token_offsets
        if self._echoes:
            echo = self._echoes[delta.index // self._call.n]
            offsets = [len(echo.text) + offset for offset in offsets]
            if delta.index in self._unopened:
                self._unopened.discard(delta.index)
                text, token_ids = echo.text + text, echo.token_ids + token_ids
                offsets = echo.offsets + offsets
                entries = [*(delta.prompt_logprobs or []), *entries]
        logprobs = None
        if self._top is not None:
            logprobs = completion_logprobs(self._tokenizer, token_ids, offsets, entries, self._top)
        finish = finish_fields(delta.finish_reason, delta.stop_reason)
        return {"index": delta.index, "text": text, "logprobs": logprobs} | finish


class Echo:
    """A prompt as text, with the offset of each of its tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds) -> None:
        self.token_ids: list[int] = prompt.tolist()
        assembler = TextAssembler(tokenizer)
        delta = assembler.push(self.token_ids)
        self.text = delta.text + assembler.finish().text
        self.offsets = delta.token_offsets
