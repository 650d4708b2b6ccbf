"""The OpenAPI document, made of the table of routes and the types of their fields and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from invar.api.answers import Error, MessageError
from invar.api.errors import ANTHROPIC
from invar.api.refusals import FieldRules
from invar.observe.build import version_text

if TYPE_CHECKING:
    from invar.api.routes import Route

REF = "#/components/schemas/{name}"
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Everything that a client may send and what it may get back."""
    bodies = {route.body: route.rules for route in routes if route.body is not None}
    shown = {route.answer for route in routes if isinstance(route.answer, type)}
    types = [*bodies, *sorted(shown, key=lambda kind: kind.__name__), Error, MessageError]
    references, components = msgspec.json.schema_components(types, ref_template=REF)
    schemas = dict(zip(types, references, strict=True))
    for kind, rules in bodies.items():
        describe_other_fields(components[schemas[kind]["$ref"].rpartition("/")[2]], rules)
    paths: dict[str, Any] = {}
    for route in routes:
        # Starlette's marker of an id that may hold slashes is no part of a template there.
        path = paths.setdefault(re.sub(r":path\}", "}", route.path), {})
        for method in route.methods:
            path[method.lower()] = operation(route, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Invar", "version": version_text()},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY},
        "security": [{}, *({name: []} for name in SECURITY)],
    }


def describe_other_fields(schema: dict[str, Any], rules: FieldRules) -> None:
    """Fields that are known and are no parameters: what is refused, and what changes nothing."""
    properties = schema["properties"]
    for name, refusal in rules.refusals.items():
        neutral = [None, *refusal.neutral]
        reason = f"Anything else cannot be honoured: {refusal.reason}."
        properties.setdefault(name, {"enum": neutral, "description": reason})
    for name in sorted(rules.known):
        properties.setdefault(name, {"description": "Refused where it cannot be honoured."})
    for name in sorted(rules.without_effect):
        properties.setdefault(name, {"description": "Accepted; the answer is the same."})


def operation(route: Route, method: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_"),
        "summary": summary(route),
        "responses": answers(route, method, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query
    ]
    if parameters:
        document["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        document["requestBody"] = {"required": True, "content": content}
    return document


def summary(route: Route) -> str:
    text = (route.handler.__doc__ or "").strip().split("\n")[0]
    return text or route.handler.__name__.replace("_", " ").capitalize()


def answers(route: Route, method: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "OK"}
    if route.answer is not None and method != "HEAD":
        if isinstance(route.answer, str):
            content: dict[str, Any] = {route.answer: {}}
        else:
            content = {"application/json": {"schema": schemas[route.answer]}}
        if route.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        success["content"] = content
    error = MessageError if route.path.startswith(ANTHROPIC) else Error
    failure: dict[str, Any] = {"description": "An error in the dialect of the route"}
    if method != "HEAD":
        failure["content"] = {"application/json": {"schema": schemas[error]}}
    return {"200": success, "4XX": failure, "5XX": failure}
