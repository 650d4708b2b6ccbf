"""From bytes to typed fields: size, JSON, types, refusals, unknown names; in that order."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from invar.api.errors import ApiError, bad_request, malformed_json, wrong_type
from invar.api.fields import WITHOUT_EFFECT
from invar.api.refusals import REFUSALS, refuse_unbuilt
from invar.observe.metrics import Metrics

logger = logging.getLogger("invar.api")

Fields = TypeVar("Fields", bound=msgspec.Struct)

MAX_NAMED_FIELDS = 256  # distinct unknown names that are counted one by one
MAX_FIELD_NAME = 64  # characters of a name that go into a log or a metric


class UnknownFields:
    """Fields nobody here knows: counted, logged once a name, a 400 under --strict-fields."""

    def __init__(self, metrics: Metrics, strict: bool) -> None:
        self._metrics = metrics
        self._strict = strict
        self._seen: set[str] = set()

    def take(self, names: list[str]) -> None:
        if names and self._strict:
            name = shown(names[0])
            raise bad_request(f"Unknown field {name} (the server runs with --strict-fields).", name)
        for name in map(shown, names):
            if name not in self._seen:
                if len(self._seen) >= MAX_NAMED_FIELDS:
                    name = "other"
                else:
                    self._seen.add(name)
                    logger.warning("request field %s is not known and is ignored", name)
            self._metrics.count_unknown_field(name)


def shown(name: str) -> str:
    """A field's name as it may stand in a log line."""
    return name[:MAX_FIELD_NAME].encode("ascii", "backslashreplace").decode().replace("\n", "\\n")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises a 413 as soon as it is known to be too large."""
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. NaN and Infinity are no JSON and are refused as such."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(body, error) from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    return value


def parse_fields(raw: dict[str, Any], fields: type[Fields], unknown: UnknownFields) -> Fields:
    refuse_unbuilt(raw)
    known = fields.__struct_fields__
    unknown.take(
        [n for n in raw if n not in known and n not in WITHOUT_EFFECT and n not in REFUSALS]
    )
    try:
        return msgspec.convert(raw, fields)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    except (RecursionError, OverflowError):
        raise bad_request("The body is nested too deeply or holds a number out of range.") from None
