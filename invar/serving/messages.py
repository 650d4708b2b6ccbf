"""What crosses between processes: commands in, one message a step out, and word of the engine.

HTTP processes talk to the engine process (commands, reports) and hear from the supervisor (up,
down). All of it is msgpack; arrays of token ids travel as their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from invar.engine.request import EngineOutput, EngineRequest


class Message(msgspec.Struct, array_like=True, tag=True):
    """The first item says which message it is."""


class Add(Message):
    """Requests that start together: the choices and prompts of one call."""

    requests: tuple[EngineRequest, ...]


class Resume(Message):
    """The first message to an engine process: all that this client waits for, with the tokens it
    has received. The engine forgets what else it may have of this client."""

    requests: tuple[EngineRequest, ...]


class Abort(Message):
    """Requests whose caller has gone or has seen enough. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


class ResetCache(Message):
    """Requests that are added later reuse nothing computed before."""


Command = Add | Resume | Abort | ResetCache


class StepReport(Message):
    """What one step brought. ``stats`` are the engine's gauges and running totals by name; none
    where the last ones are fresh enough."""

    outputs: list[EngineOutput]
    refused: dict[str, str] = {}  # id → why it can never run
    stats: dict[str, float] = {}


class StoreFacts(Message):
    """What is kept of prompts on disk."""

    folder: str
    limit_bytes: int | None  # None: it is only read
    tokens: int  # that are there now


class EngineFacts(Message):
    """What an engine that has loaded says of itself."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int  # of one request that is alone
    kv_bytes: int
    fingerprint: str
    memory: tuple[tuple[str, int], ...] = ()  # rows (what, bytes) of the table shown at start
    store: StoreFacts | None = None


class EngineUp(Message):
    """An engine process takes commands now, at the socket of its number."""

    number: int


class EngineDown(Message):
    """It has ended. ``condemned``: requests that will not be tried again, and why. ``fatal``: why
    there will be no other engine process."""

    condemned: dict[str, str] = {}
    fatal: str | None = None


class Hello(Message):
    """A client is there and wants to hear how the engine is."""


class Ready(Message):
    """From the engine process to the supervisor: the model is loaded."""

    facts: EngineFacts


class LoadFailed(Message):
    """The model cannot be loaded, in words for whoever started it."""

    error: str


Event = StepReport | EngineUp | EngineDown
ToSupervisor = Hello | Ready | LoadFailed
ToClient = EngineUp | EngineDown


def pack_array(value: Any) -> bytes:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} does not cross processes")
    return value.astype(np.int32, copy=False).tobytes()


def unpack_array(kind: type, value: Any) -> Any:
    """Token ids, read-only."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} does not cross processes")
    return np.frombuffer(value, np.int32)


encode = msgspec.msgpack.Encoder(enc_hook=pack_array).encode
decode_command = msgspec.msgpack.Decoder(Command, dec_hook=unpack_array).decode
decode_report = msgspec.msgpack.Decoder(StepReport).decode
decode_for_supervisor = msgspec.msgpack.Decoder(ToSupervisor).decode
decode_for_client = msgspec.msgpack.Decoder(ToClient).decode

Deliver = Callable[[Event], None]


class EnginePort(Protocol):
    """The HTTP side's end of the boundary."""

    def start(self, deliver: Deliver) -> None:
        """Called on the event loop, as ``deliver`` is from then on: once a step, and when the
        engine comes or goes."""

    def send(self, command: Command) -> None:
        """Returns at once; a command is obeyed before the next step. While no engine is up,
        commands go nowhere: what matters of them is in the ``Resume`` to the next one."""

    def is_watched(self) -> bool:
        """Whether there is somebody who would start another engine if this one died."""

    async def close(self) -> None:
        """Lets go of the engine; nothing is delivered any more."""


class StepEngine(Protocol):
    """The engine as its worker sees it."""

    on_step: Callable[[list[str]], None] | None  # hears ids, as `Engine.on_step`

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(self, request: EngineRequest) -> None:
        """Raises ValueError for a request that can never run."""

    def abort(self, request_id: str) -> object: ...

    def reset_prefix_cache(self) -> object: ...

    def step(self) -> list[EngineOutput]: ...

    def stats(self) -> object:
        """Gauges and totals: a mapping or an object with named fields."""

    def rest(self) -> bool:
        """Called after a second without requests, for what may take 20 ms; False: no more."""

    def close(self) -> None: ...
