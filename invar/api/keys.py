"""API keys: kept as digests only, each with what it may do.

A key file is plain text with a key a line (llama.cpp's form), or YAML or JSON with limits:

    keys:
      - name: team-a                # in logs, in place of the key
        key: sk-...                 # or its SHA-256: `printf %s KEY | sha256sum`
        models: [smollm2]           # none named: all
        requests_per_minute: 60
        tokens_per_minute: 100000   # of prompts and answers
        max_parallel_requests: 4
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from invar.api.errors import ApiError
from invar.api.key_use import REQUESTS, TOKENS, KeyUse
from invar.api.rates import Bucket, duration_text

# What a header can carry in one word.
SENDABLE = re.compile(r"[!-~]{1,512}")
NAME = re.compile(r"[\w.@-]{1,64}")
Whole = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyFileError(ValueError):
    """A key file that cannot be understood; says where."""


class KeySettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One key of a file."""

    name: str | None = None
    key: str | None = None
    sha256: str | None = None
    models: list[str] | None = None
    requests_per_minute: Whole | None = None
    tokens_per_minute: Whole | None = None
    max_parallel_requests: Whole | None = None


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeySettings]


class ApiKey:
    """A key and what may be used of it. Tokens are reserved at the start and settled at the end of
    a request."""

    def __init__(self, name: str, digest: bytes, settings: KeySettings | None = None) -> None:
        """``digest``: SHA-256 of the key."""
        self._settings = settings or KeySettings()
        self.name = name
        self.digest = digest
        self.models = self._settings.models
        self.max_parallel = self._settings.max_parallel_requests
        self._mean_s = 1.0  # of its requests, from their beginning to their end
        self.kept_in(KeyUse(1), 0)

    def kept_in(self, use: KeyUse, key: int) -> None:
        """``key``: its row there."""
        self._use, self._key = use, key
        self.requests = self._bucket(self._settings.requests_per_minute, REQUESTS)
        self.tokens = self._bucket(self._settings.tokens_per_minute, TOKENS)

    def _bucket(self, a_minute: int | None, column: int) -> Bucket | None:
        return None if a_minute is None else Bucket(a_minute, self._use, self._key, column)

    @property
    def running(self) -> int:
        """Its requests that run now."""
        return self._use.running(self._key)

    def begin(self, now: float) -> None:
        """A request comes in. Raises a 429; otherwise `end` must follow."""
        with self._use:
            if self.max_parallel is not None and self.running >= self.max_parallel:
                limit = f"{self.max_parallel} requests at a time"
                raise rate_limited("requests", limit, self._mean_s / self.max_parallel)
            if self.requests is not None:
                wait_s = self.requests.take(1, now)
                if wait_s:
                    raise rate_limited("requests", f"{self.requests.size} a minute", wait_s)
            self._count(1)

    def end(self, seconds: float) -> None:
        with self._use:
            self._count(-1)
        self._mean_s += (seconds - self._mean_s) / 8

    def _count(self, change: int) -> None:
        slot = self._use.slot
        self._use.write(self._key, slot, self._use.read(self._key, slot) + change)

    def reserve(self, prompt_tokens: int, max_tokens: int, now: float) -> int:
        """Tokens set aside for a call: all it may use, or all there can be. Raises a 429."""
        if self.tokens is None:
            return 0
        size = int(self.tokens.size)
        if prompt_tokens > size:
            error = rate_limited("tokens", f"{size} a minute, and the prompt has more", 60.0)
            error.headers["x-should-retry"] = "false"
            raise error
        amount = min(size, prompt_tokens + max_tokens)
        with self._use:
            wait_s = self.tokens.take(amount, now)
        if wait_s:
            raise rate_limited("tokens", f"{size} a minute", wait_s)
        return amount

    def settle(self, reserved: int, used: int, now: float) -> None:
        if self.tokens is not None:
            with self._use:
                self.tokens.give_back(reserved - used, now)

    def allows(self, names: Iterable[str]) -> bool:
        """Whether it may use the model of these names."""
        return self.models is None or not set(self.models).isdisjoint(names)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers of what is left."""
        found = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{kind}"] = f"{bucket.size}"
                found[f"x-ratelimit-remaining-{kind}"] = str(bucket.left(now))
                found[f"x-ratelimit-reset-{kind}"] = duration_text(bucket.full_in(now))
        return found


class KeyRing:
    """The keys of a server; none at all: everybody is let in."""

    def __init__(self, keys: Sequence[ApiKey] = (), clock: Callable[[], float] = time.monotonic):
        self.keys = tuple(keys)
        self.clock = clock

    def __len__(self) -> int:
        return len(self.keys)

    def share(self, path: Path, processes: int, index: int) -> None:
        """Counts together with the other HTTP processes, of which this is the ``index``-th."""
        use = KeyUse(len(self.keys), path, processes, index)
        for row, key in enumerate(self.keys):
            key.kept_in(use, row)

    def find(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """The key that was sent: Bearer, ``x-api-key`` or ``api-key``."""
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            sent = headers.get(b"x-api-key") or headers.get(b"api-key") or b""
        digest = hashlib.sha256(sent.strip()).digest()
        # All keys are compared, so that the time taken says nothing.
        found = [key for key in self.keys if hmac.compare_digest(digest, key.digest)]
        return found[0] if found else None


def key_ring(given: Sequence[str], path: str | None) -> KeyRing:
    """Keys of the command line and of a file. Raises ValueError saying which is wrong."""
    keys = [plain_key(key, f"--api-key, number {i}", f"key-{i}") for i, key in enumerate(given, 1)]
    if path is not None:
        keys += keys_of_file(Path(path).expanduser())
    for index, key in enumerate(keys):
        for other in keys[:index]:
            if other.name == key.name:
                raise ValueError(f"API keys: two have the name {key.name}")
            if other.digest == key.digest:
                raise ValueError(f"API keys: {other.name} and {key.name} are the same")
    return KeyRing(keys)


def plain_key(key: str, where: str, name: str) -> ApiKey:
    if not SENDABLE.fullmatch(key):
        raise KeyFileError(f"{where}: a key is 1 to 512 visible characters of ASCII, no spaces")
    return ApiKey(name, hashlib.sha256(key.encode()).digest())


def keys_of_file(path: Path) -> list[ApiKey]:
    """Raises KeyFileError with the line, never with a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise KeyFileError(f"--api-key-file {path}: {reason}") from None
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        keys = list(structured_keys(text, str(path)))
    else:
        lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1)]
        keys = [plain_key(line, f"{path}: line {i}", f"line-{i}") for i, line in lines if line]
    if not keys:
        raise KeyFileError(f"--api-key-file {path}: there is no key in it")
    return keys


def structured_keys(text: str, where: str) -> Iterator[ApiKey]:
    import yaml  # JSON too, and every node knows its line

    try:
        loader = yaml.SafeLoader(text)
        tree = loader.get_single_node()
        value = None if tree is None else loader.construct_document(tree)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark is not None else ""
        raise KeyFileError(f"{where}:{place} {error.problem}") from None
    except RecursionError:
        raise KeyFileError(f"{where}: nested too deeply") from None
    try:
        file = msgspec.convert(value, KeyFile)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$")
        field = field.rstrip("`").lstrip(".")
        line = line_of(tree, field)
        raise KeyFileError(f"{where}: line {line}: {field or 'keys'}: {message}") from None
    for index, settings in enumerate(file.keys):
        place = f"{where}: line {line_of(tree, f'keys[{index}]')}: keys[{index}]"
        name = settings.name or f"key-{index + 1}"
        if not NAME.fullmatch(name):
            raise KeyFileError(f"{place}.name: 1 to 64 letters, digits, dots, hyphens")
        if (settings.key is None) == (settings.sha256 is None):
            raise KeyFileError(f"{place}: give either key or sha256")
        if settings.key is not None:
            digest = plain_key(settings.key, f"{place}.key", name).digest
        elif re.fullmatch(r"[0-9a-fA-F]{64}", settings.sha256 or ""):
            digest = bytes.fromhex(settings.sha256 or "")
        else:
            raise KeyFileError(f"{place}.sha256: 64 hexadecimal digits are expected")
        if settings.models == []:
            raise KeyFileError(f"{place}.models: name a model, or leave it out for all")
        yield ApiKey(name, digest, settings)


def line_of(node: Any, path: str) -> int:
    """The line of ``keys[1].models`` in a composed document, or of what is nearest above it."""
    line = 1
    for index, name in re.findall(r"\[(\d+)\]|(\w+)", path):
        if node is None:
            break
        line = node.start_mark.line + 1
        children = node.value if isinstance(node.value, list) else []
        if name:
            node = next((v for k, v in children if k.value == name), None)
        else:
            node = dict(enumerate(children)).get(int(index))
    return line if node is None else int(node.start_mark.line) + 1


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Send a valid API key as Authorization: Bearer KEY.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def model_not_allowed(key: ApiKey) -> ApiError:
    return ApiError(
        403,
        f"This API key may not use this model. It may use: {', '.join(key.models or ())}.",
        type="permission_error",
        param="model",
        code="model_not_allowed",
    )


def rate_limited(kind: str, limit: str, wait_s: float) -> ApiError:
    """``kind``: requests or tokens, which is the type of OpenAI's errors too."""
    seconds = max(1, int(-(-wait_s // 1)))
    return ApiError(
        429,
        f"The rate limit of this API key is reached ({kind}: {limit}). "
        f"Please try again in {seconds} s.",
        type=kind,
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )
