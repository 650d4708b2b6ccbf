"""What a request says of its answer's form, under the names of every peer, as one constraint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from invar.api.errors import bad_request
from invar.api.fields import GenerationFields
from invar.engine.door import Door
from invar.grammar.compiler import COMPILE_LIMIT_S
from invar.grammar.structured_outputs import StructuredOutputs

# Fields whose value is one of `StructuredOutputs`, and which: vLLM's older names, SGLang's and
# llama.cpp's.
SAME_VALUE: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
FORMATS = "text, json_object, json_schema, structural_tag"


def structured_outputs(fields: GenerationFields) -> tuple[str, StructuredOutputs] | None:
    """The constraint and the field that it was given in. Raises a 400."""
    given = list(_given(fields))
    if not given:
        if fields.guided_whitespace_pattern is not None:
            raise bad_request(
                "guided_whitespace_pattern is about guided_json.", "guided_whitespace_pattern"
            )
        return None
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise bad_request(f"{names} exclude each other: send one of them.", given[1][0])
    name, options = given[0]
    if fields.guided_whitespace_pattern is not None:
        options["whitespace_pattern"] = fields.guided_whitespace_pattern
    try:
        return name, StructuredOutputs(**options)
    except (ValueError, TypeError) as error:
        raise bad_request(f"{name}: {error}", name) from None


def _given(fields: GenerationFields) -> Iterator[tuple[str, dict[str, Any]]]:
    if fields.structured_outputs is not None:
        yield "structured_outputs", dict(fields.structured_outputs)
    if fields.response_format is not None:
        options = of_response_format(fields.response_format)
        if options is not None:
            yield "response_format", options
    for name, option in SAME_VALUE.items():
        value = getattr(fields, name)
        if value not in (None, ""):
            yield name, {option: value}


def of_response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """None: any text. OpenAI's shape, the flat one of /v1/responses, and llama.cpp's schema beside
    json_object."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return {"structural_tag": dict(form)}
    if kind not in ("json_object", "json_schema"):
        raise bad_request(
            f"response_format.type: {kind!r:.40} is not known; known are {FORMATS}.",
            "response_format.type",
        )
    inner = form.get("json_schema", form)
    if not isinstance(inner, Mapping):
        raise bad_request(
            "response_format.json_schema: expected an object.", "response_format.json_schema"
        )
    schema = inner.get("schema")
    if schema is None:
        if kind == "json_object":
            return {"json_object": True}
        raise bad_request(
            "response_format.json_schema: schema is missing.", "response_format.json_schema.schema"
        )
    strict = inner.get("strict")
    return {"json": schema, "strict": False if strict is None else strict}


async def compiled(door: Door, form: StructuredOutputs) -> str | None:
    """The form's grammar, once the door knows whether it is good; None: it compiles none. Raises
    ValueError where that takes too long, or where the form has no grammar."""
    if door.grammars is None:
        return None
    text = await asyncio.to_thread(door.normalised, form)
    future = asyncio.wrap_future(door.grammars.compile(text))
    done, _ = await asyncio.wait([future], timeout=COMPILE_LIMIT_S)
    if not done:
        raise ValueError(f"structured_outputs: it takes more than {COMPILE_LIMIT_S:g} s to compile")
    future.exception()  # `Door.prepare` raises it
    return text
