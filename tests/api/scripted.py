"""A model that says what a test wrote down, behind the real engine boundary and the real text code.

Pieces are written as text; `vocabulary()` gives each an id. A script says, for an engine request,
which tokens come in which step.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn

from invar.api.app import create_app
from invar.api.protocol import Connection
from invar.api.server import ServedModel, Server
from invar.engine.door import Door
from invar.engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from invar.engine.sampling_defaults import SamplingDefaults
from invar.observe.metrics import Metrics
from invar.serving.async_engine import AsyncEngine
from invar.text.chat_template import ChatTemplate
from invar.text.reply_detection import model_replies
from invar.text.tokenizer import Tokenizer

from .in_process import ThreadPort

PIECES = (
    "Hello", " world", "!", "ab", "EN", "D_", "HERE", "zz", "END_H", "OPE", "axb", "END", " tail",
    "Q9", ":", "one", " two", " three", "tool",
)  # fmt: skip
CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|hidden|>")
EOS = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Step = Sequence[int]
Script = Callable[[EngineRequest], Iterator[Step]]


def vocabulary(add_bos: bool = True) -> dict[str, Any]:
    """GGUF metadata of a small SentencePiece vocabulary with byte tokens."""
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, *[3] * (len(CONTROL) - 1), *[6] * 256]
    # SentencePiece joins two pieces at a time: every beginning of a piece is a piece.
    beginnings = [piece[:end] for piece in PIECES for end in range(2, len(piece))]
    pieces = [*PIECES, *beginnings, *(chr(c) for c in range(32, 127))]
    pieces = [piece.replace(" ", "▁") for piece in dict.fromkeys(pieces)]
    tokens += pieces
    types += [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-float(i) for i in range(len(tokens))], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": CONTROL.index(EOS),
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }


IDS = {text: i for i, text in enumerate(vocabulary()["tokenizer.ggml.tokens"])}


def token(piece: str | bytes) -> int:
    if isinstance(piece, bytes):
        return IDS[f"<0x{piece[0]:02X}>"]
    return IDS[piece if piece in IDS else piece.replace(" ", "▁")]


def says(*pieces: str | bytes, grouped: int = 1) -> Script:
    """The same pieces for every choice, `grouped` tokens a step."""
    ids = [token(piece) for piece in pieces]

    def script(request: EngineRequest) -> Iterator[Step]:
        for start in range(0, len(ids), grouped):
            yield ids[start : start + grouped]

    return script


def endless(piece: str = "zz", pause_s: float = 0.002) -> Script:
    def script(request: EngineRequest) -> Iterator[Step]:
        while True:
            time.sleep(pause_s)
            yield [token(piece)]

    return script


def failing(after: int) -> Script:
    """Slow enough that a client has what came before the failure."""

    def script(request: EngineRequest) -> Iterator[Step]:
        for _ in range(after):
            yield [token("Hello")]
            time.sleep(0.1)
        raise RuntimeError("the logits were not finite")

    return script


@dataclass
class _Running:
    request: EngineRequest
    steps: Iterator[Step]
    tokens: int = 0


class ScriptedEngine:
    """Follows `invar.engine.engine.Engine`: same methods, outputs and reasons to end."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.on_step: Callable[[list[str]], None] | None = None
        self.running: dict[str, _Running] = {}
        self.seen: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.resets = 0
        self.steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add_request(self, request: EngineRequest) -> None:
        if request.id in self.running:
            raise ValueError(f"request {request.id}: a request with this id is running")
        self.seen.append(request)
        self.running[request.id] = _Running(request, self.script(request))

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        running = len(self.running)
        return {"running": running, "waiting": 0, "kv_usage": running / 100, "preemptions": 3}

    def rest(self) -> bool:
        return False

    def step(self) -> list[EngineOutput]:
        self.steps += 1
        return [self._advance(state) for state in list(self.running.values())]

    def _advance(self, state: _Running) -> EngineOutput:
        request = state.request
        output = EngineOutput(request.id, [], cached_tokens=1 if not state.tokens else None)
        if not state.tokens:
            output.timing = {"arrival": time.monotonic(), "first_scheduled": time.monotonic()}
            count = request.sampling.prompt_logprobs
            if count is not None:
                ids = request.prompt_token_ids.tolist()
                output.prompt_logprobs = [None, *(scored(i, count) for i in ids[1:])]
        try:
            step = next(state.steps, [token(EOS)])
            allowed = request.sampling.allowed_token_ids
            if allowed is not None and len(allowed) == 1:
                step = list(allowed) * len(step)
        except RuntimeError as error:
            del self.running[request.id]
            return EngineOutput(request.id, [], finish_reason=FinishReason.ERROR, error=str(error))
        for token_id in step:
            output.token_ids.append(token_id)
            state.tokens += 1
            if token_id in request.stop_token_ids and state.tokens > request.min_tokens:
                output.finish_reason, output.stop_reason = FinishReason.STOP, token_id
            elif state.tokens >= request.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                del self.running[request.id]
                break
        if request.sampling.logprobs is not None:
            output.logprobs = [scored(i, request.sampling.logprobs) for i in output.token_ids]
        return output


def scored(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is the highest one; alternatives are the ids after it."""
    top = tuple(token_id + i for i in range(count))
    return TokenLogprobs(token_id, -0.25, 1, top, tuple(-0.25 - i for i in range(count)))


def served(
    script: Script,
    *,
    max_model_len: int = 256,
    add_bos: bool = True,
    with_template: bool = True,
    template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    defaults: SamplingDefaults | None = None,
    **options: Any,
) -> tuple[Server, ScriptedEngine]:
    metadata = vocabulary(add_bos)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    tokenizer = Tokenizer.from_gguf(metadata)
    chat_template = ChatTemplate.from_gguf(metadata) if with_template else None
    engine = ScriptedEngine(script)
    model = ServedModel(
        names=("scripted", "org/scripted"),
        tokenizer=tokenizer,
        chat_template=chat_template,
        replies=None
        if chat_template is None
        else model_replies(
            chat_template, tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )[0],
        door=Door(
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            kv_capacity_tokens=max_model_len,
            eos_token_ids=tokenizer.stop_token_ids,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        ),
        fingerprint="fp_test",
        defaults=defaults or SamplingDefaults(),
    )
    metrics = Metrics("scripted")
    async_engine = AsyncEngine(ThreadPort(engine), metrics)
    return Server(model, async_engine, metrics, **options), engine


@dataclass
class RunningServer:
    url: str
    server: Server
    engine: ScriptedEngine
    http: httpx.Client = field(init=False)
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hi", **fields})

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that the chat route makes of a conversation."""
        answer = self.http.post("/tokenize", json={"messages": messages})
        ids: list[int] = answer.json()["tokens"]
        return ids

    def idle(self, within_s: float = 3.0) -> bool:
        """Whether nothing is in flight on either side, waiting for it."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if not self.engine.running and not self.server.engine.unfinished:
                return True
            time.sleep(0.005)
        return False


@contextlib.contextmanager
def running(script: Script, *, idle_s: int = 75, **options: Any) -> Iterator[RunningServer]:
    """A real server on a free port, in a thread. ``idle_s``: how long it waits for a request."""
    server, engine = served(script, **options)
    with listening(server, idle_s) as url:
        handle = RunningServer(url, server, engine)
        yield handle
        handle.http.close()
        handle.client.close()


@contextlib.contextmanager
def listening(server: Server, idle_s: int = 75) -> Iterator[str]:
    config = uvicorn.Config(
        create_app(server),
        log_level="error",
        access_log=False,
        lifespan="on",
        loop="uvloop",
        http=Connection,
        timeout_keep_alive=idle_s,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, args=([listener],), daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(10)
        listener.close()


def events(response: httpx.Response) -> list[str]:
    """The data of each server-sent event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def typed_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of each server-sent event; all are named as their type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        frames.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {frames[-1]['type']}"
    return frames
