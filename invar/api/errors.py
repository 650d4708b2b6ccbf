"""Errors in the shape of the route's dialect: bounded, typed, never repeating what was sent."""

from __future__ import annotations

import json
import re

import msgspec

MAX_MESSAGE = 1000  # characters; an error never grows with the request
ANTHROPIC = "/v1/messages"  # the routes whose errors have Anthropic's shape begin with it
# https://docs.anthropic.com/en/api/errors
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200. ``param`` is the JSON path of what was wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def label(self) -> str:
        """Its code in metrics and logs; one of a few."""
        return self.code or self.type

    def body(self, path: str = "", request_id: str = "") -> bytes:
        """The error as the dialect of ``path`` writes it, in a response or in a stream."""
        message = self.message.encode("utf-8", "replace").decode()
        if path.startswith(ANTHROPIC):
            known = "invalid_request_error" if self.status < 500 else "api_error"
            shaped = {"type": ANTHROPIC_TYPES.get(self.status, known), "message": message}
            return msgspec.json.encode(
                {"type": "error", "error": shaped, "request_id": request_id or None}
            )
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self, path: str = "", request_id: str = "") -> bytes:
        """The error as the last event of a stream."""
        name = b"event: error\n" if path.startswith(ANTHROPIC) else b""
        return name + b"data: " + self.body(path, request_id) + b"\n\n"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_overflow(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")


def engine_failed(error: str) -> ApiError:
    """The request was right and the engine could not finish it; a retry would fail the same way."""
    return ApiError(
        500, error, type="server_error", code="engine_error", headers={"x-should-retry": "false"}
    )


def engine_dead(error: str) -> ApiError:
    return ApiError(
        503,
        f"The engine has ended: {error}",
        type="server_error",
        code="engine_dead",
        headers={"retry-after": "5"},
    )


def not_ready(status: str) -> ApiError:
    return ApiError(
        503,
        f"The engine is {status}. Please send the request again.",
        type="server_error",
        code="engine_not_ready",
        headers={"retry-after": "5"},
    )


def deadline_exceeded() -> ApiError:
    """Not to be sent again: whoever waited has stopped to."""
    return ApiError(
        504,
        "The time that x-request-timeout-ms gave this request is over, and its answer is not "
        "complete.",
        type="server_error",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def internal(request_id: str) -> ApiError:
    """Nothing of the request goes into the answer, its id is enough to find the trace."""
    return ApiError(
        500,
        f"The server failed at this request; its log has the reason under {request_id}.",
        type="server_error",
        code="internal_error",
        headers={"x-should-retry": "false"},
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down and could not finish this request. Please send it again.",
        type="server_error",
        code="server_shutting_down",
        headers={"retry-after": "5", "connection": "close"},
    )


def malformed_json(body: bytes, error: Exception) -> ApiError:
    """Line and column of what is wrong, counted in characters from 1."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as decode_error:
        line, column = _line_and_column(body[: decode_error.start].decode("utf-8"))
        return bad_request(
            f"The body is not valid UTF-8: line {line}, column {column} "
            f"(byte {decode_error.start}). Send JSON encoded as UTF-8."
        )
    reason = str(error).removeprefix("JSON is malformed: ")
    found = re.search(r" \(byte (\d+)\)$", reason)
    if found:
        before = body[: int(found[1])].decode("utf-8", "ignore")
        reason = reason[: found.start()]
    else:
        before = text[: _stdlib_position(text)]
    line, column = _line_and_column(before)
    return bad_request(f"The body is not valid JSON: {reason} at line {line}, column {column}.")


def _stdlib_position(text: str) -> int:
    """Where the standard library's parser stumbles, for errors that carry no place."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos
    except (RecursionError, ValueError):  # too deep, or an integer of too many digits
        return 0
    return len(text)


def _line_and_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def wrong_type(error: msgspec.ValidationError) -> ApiError:
    """``Expected `int`, got `str` - at `$.n``` → a sentence and the path ``n``."""
    message, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    # A tagged value may be quoted by the message; the path says enough.
    message = re.sub(r"value '.*'", "value", message, flags=re.DOTALL)
    place = f" at {param}" if param else ""
    return bad_request(f"{message}{place}.", param)
