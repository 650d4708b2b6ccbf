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
    finish_fields,
    start_call,
)
from invar.api.fields import CompletionFields
from invar.api.limits import check_n, check_range
from invar.api.logprobs import completion_logprobs, prompt_logprobs
from invar.api.prompts import TokenIds, check_fits, check_prompt_sizes, completion_prompts
from invar.api.sampling import (
    choice_requests,
    prepare_sampling,
    scoring_requests,
    tenant_of,
    wanted_tokens,
)
from invar.api.server import ServedModel, Server
from invar.api.streams import Frames, TextFrames, answer, events
from invar.api.threads import beside_loop
from invar.engine.door import ResolvedParams
from invar.engine.request import TokenLogprobs
from invar.engine.sampling_params import SamplingParams
from invar.grammar.thoughts import Thoughts
from invar.serving.async_engine import ChoiceRequest
from invar.serving.choice import ChoiceDelta
from invar.text.output import TextAssembler
from invar.text.tokenizer import Tokenizer

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's, also for null
ITEMS_A_CHOICE = 1000  # what the states of 16 stop strings come to, in items of `beside_loop`


async def completions(server: Server, request: Request) -> Response:
    raw = parse_json(await read_body(request, server.limits.body_bytes), server.caps)
    check_prompt_sizes(server, raw)
    fields = parse_fields(raw, CompletionFields, server.field_counts)
    server.model.check_name(fields.model)
    check_stream_options(fields)
    check_range("logprobs", fields.logprobs, 0, server.limits.logprobs)
    n = 1 if fields.n is None else fields.n
    check_n(server.limits, n, prompts=1)
    scores_only = fields.scores_only
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    max_tokens = wanted_tokens([("max_tokens", 1 if scores_only else wanted)])
    ready = await prepare_sampling(
        server, fields, fields.logprobs, max_tokens, scores_only=scores_only
    )
    specials = True if fields.add_special_tokens is None else fields.add_special_tokens
    prompts = await completion_prompts(server, fields.prompt, specials)
    check_n(server.limits, n, len(prompts))
    for prompt in prompts:
        check_fits(server, len(prompt), 0 if scores_only else max_tokens, "prompt")
    size = len(prompts) * n * ITEMS_A_CHOICE
    tenant = tenant_of(server, request, fields)
    choices = await beside_loop(size, lambda: all_choices(server, fields, ready, prompts, tenant))
    echoed = prompts if fields.echo else []
    tokenizer = server.model.tokenizer
    echoes = await beside_loop(sum(map(len, echoed)), lambda: [Echo(tokenizer, p) for p in echoed])
    call = start_call(server, request, "cmpl", fields, prompts, choices, warnings=ready.warnings)
    writer = CompletionWriter(call, fields, echoes)
    return await answer(request, call, writer, fields.stream)


def all_choices(
    server: Server,
    fields: CompletionFields,
    ready: ResolvedParams,
    prompts: list[TokenIds],
    tenant: str | None,
) -> list[ChoiceRequest]:
    """Those of every prompt, one prompt after the other."""
    choices = []
    for prompt in prompts:
        if fields.scores_only:
            choices += scoring_requests(server, fields, ready, prompt, tenant)
        else:
            choices += choice_requests(
                server,
                fields,
                ready,
                prompt,
                tenant,
                echo_logprobs=fields.logprobs if fields.echo else None,
                thoughts=thoughts_behind(server.model, ready.params, prompt),
            )
    return choices


def thoughts_behind(
    model: ServedModel, params: SamplingParams, prompt: TokenIds
) -> Thoughts | None:
    """A text that is gone on with has thoughts where somebody bounds them."""
    if params.thinking_token_budget is None or model.replies is None:
        return None
    return model.replies.thoughts(model.tokenizer.decode_end(prompt))


class CompletionWriter(Frames):
    """Responses and chunks; with echo the prompt stands before the text of every choice."""

    def __init__(self, call: Call, fields: CompletionFields, echoes: list[Echo]) -> None:
        self._call = call
        self._top = fields.logprobs
        self._prompt_top = fields.prompt_logprobs
        self._scores_only = fields.scores_only
        self._tokenizer = call.server.model.tokenizer
        self._echoes = echoes
        self._unopened = set(range(len(self._echoes) * call.n))
        # By choice; logprobs and usage make every chunk another one.
        self._texts: dict[int, TextFrames] = {}
        self._only_text = self._top is None and not call.options.continuous_usage_stats

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        choices = []
        for one in answers:
            self._take(one)
            choice = self._choice(one)
            if self._prompt_top is not None and one.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, one.prompt_logprobs, self._prompt_top
                )
            choices.append(choice)
        return self._call.envelope(KIND, choices) | {"usage": self._call.usage.as_json()}

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(map(self._event, deltas))

    def _event(self, delta: ChoiceDelta) -> bytes:
        """The event of a choice; empty where there is nothing to tell."""
        self._take(delta)
        opens_or_ends = delta.index in self._unopened or delta.finish_reason is not None
        if not (opens_or_ends or delta.text or delta.logprobs):
            return b""
        if opens_or_ends or not self._only_text:
            return events([self._call.chunk(KIND, self._choice(delta))])
        frames = self._texts.get(delta.index)
        if frames is None:
            chunk = self._call.chunk(KIND, self._choice(ChoiceDelta(delta.index, TextFrames.MARK)))
            frames = self._texts[delta.index] = TextFrames(chunk)
        return frames.event(delta.text)

    async def closing(self) -> list[dict[str, Any]]:
        return self._call.closing(KIND)

    def _take(self, delta: ChoiceDelta) -> None:
        if self._scores_only:
            self._take_scores(delta)
        self._call.usage.take([delta])

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
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

    def _take_scores(self, delta: ChoiceDelta) -> None:
        """What was drawn is no answer: it is the prompt's last token (see `Door.score`)."""
        if delta.prompt_logprobs is not None:
            prompt = self._call.prompts[delta.index // self._call.n]
            delta.prompt_logprobs = [*delta.prompt_logprobs, *delta.logprobs][: len(prompt)]
        delta.text, delta.token_ids, delta.token_offsets, delta.logprobs = "", [], [], []


class Echo:
    """A prompt as text, with the offset of each of its tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds) -> None:
        self.token_ids: list[int] = prompt.tolist()
        assembler = TextAssembler(tokenizer)
        delta = assembler.push(self.token_ids)
        self.text = delta.text + assembler.finish().text
        self.offsets = delta.token_offsets
