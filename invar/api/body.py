"""From bytes to typed fields: size, JSON, types, refusals, unknown names; in that order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from invar.api.errors import ApiError, bad_request, malformed_json, wrong_type
from invar.api.fields import StreamOptions
from invar.api.limits import check_caps, check_items
from invar.api.refusals import OPENAI, FieldRules, refuse_unbuilt
from invar.observe.metrics import Metrics

logger = logging.getLogger("invar.api")

Fields = TypeVar("Fields", bound=msgspec.Struct)

MAX_NAMED_FIELDS = 256  # distinct unknown names that are logged
LARGE_BODY = 100_000  # bytes; what is smaller is parsed in a millisecond or two
# Fields whose commas stand between their items and nowhere else.
NUMBERS = frozenset(
    {"allowed_token_ids", "logit_bias", "stop_token_ids", "stream_options", "tokens"}
)
MAX_FIELD_NAME = 64  # characters of a name that go into a log or a metric


class FieldCounts:
    """Fields that do nothing: counted, logged once a name. Unknown ones are a 400 if strict."""

    def __init__(self, metrics: Metrics, strict: bool) -> None:
        self._metrics = metrics
        self._strict = strict
        self._seen: set[str] = set()

    def take_unknown(self, names: Sequence[str]) -> None:
        if names and self._strict:
            name = shown(names[0])
            raise bad_request(f"Unknown field {name} (the server runs with --strict-fields).", name)
        for name in names:
            self._count(name, logging.WARNING, "request field %s is not known and is ignored")

    def take_idle(self, names: Sequence[str]) -> None:
        """Known ones that change nothing here."""
        for name in names:
            self._count(name, logging.INFO, "request field %s has no effect on an answer here")

    def _count(self, name: str, level: int, message: str) -> None:
        name = shown(name)
        if name not in self._seen and len(self._seen) < MAX_NAMED_FIELDS:
            self._seen.add(name)
            logger.log(level, message, name)
        self._metrics.count_unknown_field(name)


def shown(name: str) -> str:
    """A field's name as it may stand in a log line."""
    return name[:MAX_FIELD_NAME].encode("ascii", "backslashreplace").decode().replace("\n", "\\n")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises a 413 as soon as it is known to be too large, a 415 if compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(415, "The body must be sent as it is, without a Content-Encoding.")
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse_json(body: bytes, caps: Mapping[str, int]) -> dict[str, Any]:
    """The body as an object. NaN and Infinity are no JSON and are refused as such.

    ``caps``: how many items a field may have; looked at before anything goes through them.
    """
    if len(body) > LARGE_BODY:
        check_commas(body, caps)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(body, error) from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise bad_request("The body holds an integer of too many digits.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    check_caps(value, caps)
    return value


def check_commas(body: bytes, caps: Mapping[str, int]) -> None:
    """Refuses long lists of numbers unparsed: a million objects of Python take half a second."""
    try:
        parts = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # `parse_json` finds the same and says where
    for name in NUMBERS & parts.keys():
        check_items(name, bytes(parts[name]).count(b",") + 1, caps[name])
    check_items("The body", len(parts), caps[""])


def parse_fields(
    raw: dict[str, Any], fields: type[Fields], counts: FieldCounts, rules: FieldRules = OPENAI
) -> Fields:
    refuse_unbuilt(raw, rules)
    idle = rules.without_effect
    known = {*fields.__struct_fields__, *rules.refusals, *rules.known, *idle}
    unknown = [name for name in raw if name not in known]
    counts.take_unknown([*unknown, *unknown_stream_options(raw)])
    counts.take_idle([name for name in raw if name in idle and raw[name] is not None])
    try:
        return msgspec.convert(raw, fields)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    except (RecursionError, OverflowError):
        raise bad_request("The body is nested too deeply or holds a number out of range.") from None


def unknown_stream_options(raw: Mapping[str, Any]) -> list[str]:
    options = raw.get("stream_options")
    known = StreamOptions.__struct_fields__
    names = options if isinstance(options, dict) else {}
    return [f"stream_options.{name}" for name in names if name not in known]


def needed(part: msgspec.Struct, name: str, where: str) -> str:
    """A text that parts of this type must have, and others need not. Raises a 400."""
    value: str | None = getattr(part, name)
    if value is None:
        raise bad_request(f"{where}: one of this type needs {name}.", f"{where}.{name}")
    return value
