"""What the handlers share: the served model, the engine, the limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from invar.api.admission import Admission
from invar.api.body import FieldCounts
from invar.api.errors import ApiError
from invar.api.keys import KeyRing
from invar.api.limits import Limits
from invar.api.response_store import KeptResponses
from invar.api.stream_guard import StreamGuard
from invar.engine.door import Door
from invar.engine.sampling_defaults import SamplingDefaults
from invar.observe.access_log import AccessLog
from invar.observe.metrics import QUIET_ROUTES, Metrics
from invar.observe.requests import RequestRecord
from invar.serving.async_engine import AsyncEngine
from invar.text.chat_template import ChatTemplate
from invar.text.reply_detection import ModelReplies
from invar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from invar.observe.traces import Traces


@dataclass(frozen=True)
class ServedModel:
    """The model as a client sees it."""

    names: tuple[str, ...]  # the first is the one in responses
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    door: Door  # what the model allows, and how a request becomes complete
    fingerprint: str
    replies: ModelReplies | None = None  # how they are read; None: it cannot chat
    root: str = ""  # where the model came from
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # of silent requests
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.door.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.door.vocab_size

    def check_name(self, name: str | None) -> None:
        """No name means this model: there is only one."""
        if name and name not in self.names:
            shown = name[:200]
            raise ApiError(
                404,
                f"The model `{shown}` does not exist. This server has: {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )


@dataclass
class Server:
    """The state of one HTTP process."""

    model: ServedModel
    engine: AsyncEngine
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    strict_fields: bool = False
    takes_priorities: bool = False  # the scheduler looks at them
    keys: KeyRing = field(default_factory=KeyRing)
    max_running: int = 64  # engine requests that run together
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    open_metrics: bool = False  # /metrics needs no key
    responses: KeptResponses | None = None  # those of /v1/responses that are kept
    draining: bool = False  # running requests are finished, no new one is taken
    access_log: AccessLog | None = None
    traces: Traces | None = None
    clock: Callable[[], float] = time.time
    field_counts: FieldCounts = field(init=False)
    caps: Mapping[str, int] = field(init=False)  # items of a field
    admission: Admission = field(init=False)
    stream_guard: StreamGuard = field(init=False)

    def __post_init__(self) -> None:
        self.field_counts = FieldCounts(self.metrics, self.strict_fields)
        self.admission = Admission(
            self.engine,
            self.metrics,
            self.max_running,
            self.max_queued_requests,
            self.max_queued_tokens,
            clock=lambda: self.keys.clock(),
        )
        self.stream_guard = StreamGuard(self.limits)
        self.caps = self.limits.caps(self.model.vocab_size, self.model.max_model_len)

    def observe(self, record: RequestRecord) -> None:
        """An HTTP request has ended."""
        self.metrics.observe_request(record)
        if self.traces is not None and record.route not in QUIET_ROUTES:
            self.traces.end(record)
        if self.access_log is not None:
            self.access_log.write(record)

    def close(self) -> None:
        """Nothing comes any more: writes what is known. Not for the event loop."""
        if self.access_log is not None:
            self.access_log.close()
        if self.traces is not None:
            self.traces.close()

    @property
    def background(self) -> Collection[object]:
        """Responses that run in this process without a client that waits."""
        return () if self.responses is None else self.responses.running
