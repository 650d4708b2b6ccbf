"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_fields, parse_json, read_body
from invar.api.calls import json_response
from invar.api.errors import bad_request
from invar.api.fields import DetokenizeFields, TokenizeFields
from invar.api.limits import checked_token_ids
from invar.api.prompts import TokenIds, chat_prompt, text_prompt
from invar.api.server import Server
from invar.api.threads import beside_loop


async def tokenize(server: Server, request: Request) -> Response:
    """Ids of a text or of a conversation as the chat route would send it to the model."""
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields = parse_fields(raw, TokenizeFields, server.field_counts)
    server.model.check_name(fields.model)
    texts = [text for text in (fields.prompt, fields.content) if text is not None]
    if len(texts) + (fields.messages is not None) != 1:
        raise bad_request("Send either prompt or messages.", "prompt")
    if texts:
        check_no_chat(fields)
        specials = True if fields.add_special_tokens is None else fields.add_special_tokens
        ids = await text_prompt(server, texts[0], "prompt", add_special_tokens=specials)
    else:
        ids = (await chat_prompt(server, raw["messages"], fields, len(body))).ids
    return await beside_loop(
        len(ids), lambda: token_list(server, ids, bool(fields.return_token_strs))
    )


def check_no_chat(fields: TokenizeFields) -> None:
    chat = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    for name in chat:
        if getattr(fields, name) is not None:
            raise bad_request(f"{name} needs messages in place of a text.", name)


def token_list(server: Server, ids: TokenIds, with_strings: bool) -> Response:
    tokens = ids.tolist()
    text = server.model.tokenizer.token_text
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": server.model.max_model_len,
            "tokens": tokens,
            "token_strs": [text(token) for token in tokens] if with_strings else None,
        }
    )


async def detokenize(server: Server, request: Request) -> Response:
    raw = parse_json(await read_body(request, server.limits.body_bytes), server.caps)
    fields = parse_fields(raw, DetokenizeFields, server.field_counts)
    server.model.check_name(fields.model)
    ids = checked_token_ids("tokens", fields.tokens, server.model.tokenizer.vocab_size)
    tokenizer = server.model.tokenizer
    text = await beside_loop(
        len(ids), lambda: tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    )
    return json_response({"prompt": text, "content": text})
