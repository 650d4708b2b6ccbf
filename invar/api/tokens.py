"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_fields, parse_json, read_body
from invar.api.chat import json_response
from invar.api.errors import bad_request
from invar.api.fields import DetokenizeFields, TokenizeFields
from invar.api.limits import check_token_ids
from invar.api.prompts import chat_prompt, text_prompt
from invar.api.server import Server


async def tokenize(server: Server, request: Request) -> Response:
    """Ids of a text or of a conversation as the chat route would send it to the model."""
    raw = parse_json(await read_body(request, server.limits.body_bytes))
    fields = parse_fields(raw, TokenizeFields, server.unknown_fields)
    server.model.check_name(fields.model)
    text = fields.content if fields.prompt is None else fields.prompt
    if (text is None) == (fields.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    if text is not None:
        specials = True if fields.add_special_tokens is None else fields.add_special_tokens
        ids = await text_prompt(server, text, "prompt", add_special_tokens=specials)
    else:
        ids = await chat_prompt(server, raw, fields)
    tokens = ids.tolist()
    tokenizer = server.model.tokenizer
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": server.model.max_model_len,
            "tokens": tokens,
            "token_strs": (
                [tokenizer.token_text(token) for token in tokens]
                if fields.return_token_strs
                else None
            ),
        }
    )


async def detokenize(server: Server, request: Request) -> Response:
    raw = parse_json(await read_body(request, server.limits.body_bytes))
    fields = parse_fields(raw, DetokenizeFields, server.unknown_fields)
    server.model.check_name(fields.model)
    check_token_ids("tokens", fields.tokens, server.model.tokenizer.vocab_size)
    text = server.model.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    return json_response({"prompt": text, "content": text})
