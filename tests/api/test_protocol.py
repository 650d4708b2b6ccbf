"""What comes beside a body has a size and a time."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from invar.api.protocol import MAX_HEAD_BYTES, SLICE_BYTES

from .scripted import RunningServer, listening, running, says, served

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
MOST = MAX_HEAD_BYTES + 3 * SLICE_BYTES


def sent(server: RunningServer, parts: Iterator[bytes]) -> tuple[bytes, int]:
    """What the server answers, and how many bytes it let a client send before it closed."""
    with socket.create_connection(server.address, timeout=10) as client:
        count = 0
        try:
            for part in parts:
                client.sendall(part)
                count += len(part)
        except OSError:
            pass
        answer = b""
        try:
            while part := client.recv(65536):
                answer += part
        except OSError:
            pass
        return answer, count


def forever(start: bytes, part: bytes, limit: int = 64 << 20) -> Iterator[bytes]:
    yield start
    for _ in range(limit // len(part)):
        yield part


@pytest.mark.parametrize(("start", "part"), [
    (HEAD, b"x-a: " + b"a" * 4000 + b"\r\n"),
    (HEAD, b"a: b\r\n" * 100),
    (HEAD + b"x-a: ", b"a" * 8192),
    (HEAD, b"a" * 8192),
    (b"GET /", b"a" * 8192),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 8192),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"a: b\r\n" * 100),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: ", b"a" * 8192),
])  # fmt: skip
def test_heads_and_trailers_have_a_size(hello: RunningServer, start: bytes, part: bytes) -> None:
    answer, count = sent(hello, forever(start, part))
    assert count < 32 << 20  # what the kernel's buffers hold is beyond us
    assert hello.complete().status_code == 200
    if answer:  # it may be lost where the client goes on sending
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_the_answer_is_in_shape(hello: RunningServer) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(MOST // 1000))
    answer, _ = sent(hello, iter([HEAD + many]))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    answer, _ = sent(hello, iter([b"\x16\x03\x01 this is TLS\r\n\r\n"]))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_large_heads_below_the_limit_pass(hello: RunningServer) -> None:
    headers = {f"x-{i}": "a" * 1000 for i in range(55)}
    for _ in range(3):  # on one connection: each head is counted for itself
        assert hello.http.get("/health", headers=headers).status_code == 200
        body = {"prompt": "Hi", "max_tokens": 1, "x": ["y"] * 30_000}
        answer = hello.http.post("/v1/completions", headers=headers, json=body)
        assert answer.status_code == 200


def test_many_requests_in_one_packet(hello: RunningServer) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 900 + b"\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    answer, _ = sent(hello, iter([one * 300 + last]))
    assert answer.count(b"HTTP/1.1 200") == 301


def test_bodies_in_many_small_chunks(hello: RunningServer) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "Hi", "max_tokens": 1'
        for _ in range(30_000):
            yield b"   "
        yield b"}"

    answer = hello.http.post("/v1/completions", content=chunks())
    assert answer.status_code == 200


BODY = b'{"prompt": "Hi", "max_tokens": 1}'
OFFERS_H2 = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("framed", [
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"transfer-encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (BODY[:5], len(BODY) - 5, BODY[5:]),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_an_upgrade_that_is_offered_is_not_taken(
    hello: RunningServer, framed: bytes, size: int
) -> None:
    """Java's HttpClient offers h2c with every request."""
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n" + OFFERS_H2 + b"\r\n"
    data = (HEAD + OFFERS_H2 + framed) * 2 + get + last
    answer, _ = sent(hello, (data[i : i + size] for i in range(0, len(data), size)))
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.count(b'"completion_tokens":1') == 2


def test_compressed_bodies_are_refused(hello: RunningServer) -> None:
    headers = {"content-encoding": "gzip"}
    answer = hello.http.post("/v1/completions", headers=headers, content=BODY)
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("start", [
    b"", b"GET /health HTTP/1.1\r\nhos", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea",
])  # fmt: skip
def test_a_head_that_does_not_end_is_not_waited_for(start: bytes) -> None:
    server, _ = served(says("Hello"))
    with listening(server, idle_s=1) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(start)
            began = time.monotonic()
            while client.recv(65536):
                # Bytes that come one at a time do not make it wait longer.
                pass
            assert time.monotonic() - began < 3


def test_a_long_answer_is_not_cut_by_the_time_of_heads() -> None:
    from .scripted import endless

    with running(endless(pause_s=0.03), idle_s=1) as server:
        answer = server.complete(max_tokens=60)
        assert answer.json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("start", [
    b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
])  # fmt: skip
def test_a_body_that_does_not_come_is_not_waited_for(start: bytes) -> None:
    server, _ = served(says("Hello"))
    with listening(server, idle_s=1) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(HEAD + start)
            began = time.monotonic()
            answer = b""
            while part := client.recv(65536):
                answer += part
            assert time.monotonic() - began < 4
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert json.loads(body)["error"]["code"] == "request_timeout"


def test_bytes_one_at_a_time_are_not_waited_for_while_others_are_served() -> None:
    server, engine = served(says("Hello"))
    with listening(server, idle_s=1) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port)), timeout=10) for _ in range(50)]
        for index, client in enumerate(slow):
            client.sendall(HEAD + (b"content-length: 5000\r\n\r\n" if index % 2 else b""))
        began, closed = time.monotonic(), set()
        while len(closed) < len(slow):
            assert time.monotonic() - began < 10
            for client in set(slow) - closed:
                try:
                    client.sendall(b" ")
                    client.settimeout(0.001)
                    if not client.recv(65536):
                        closed.add(client)
                except TimeoutError:
                    pass
                except OSError:
                    closed.add(client)
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=10)
            assert answer.status_code == 200
        assert not engine.running
        for client in slow:
            client.close()


def test_a_slow_body_that_gets_on_is_waited_for() -> None:
    server, _ = served(says("Hello"))

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "Hi"'
        for _ in range(15):
            yield b" " * 100
            time.sleep(0.2)
        yield b"}"

    with listening(server, idle_s=1) as url:
        answer = httpx.post(f"{url}/v1/completions", content=parts(), timeout=20)
        assert answer.status_code == 200


def test_a_large_answer_that_is_not_read_does_not_keep_its_connection() -> None:
    server, engine = served(says(*["zz"] * 30_000, grouped=1000), max_model_len=100_000)
    with listening(server, idle_s=1) as url:
        host, port = url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps({"prompt": "Hi", "max_tokens": 30_000, "logprobs": 20}).encode()
        client.sendall(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        while not engine.aborted and not (engine.seen and not engine.running):
            time.sleep(0.01)
        data, end = b"", time.monotonic() + 20
        time.sleep(4)  # the answer is written, and an idle connection has been closed
        assert httpx.get(f"{url}/health").status_code == 200
        client.settimeout(10)
        try:
            while time.monotonic() < end and (part := client.recv(1 << 20)):
                data += part
        except OSError:
            data += b""
        assert not data.rstrip().endswith(b"}")  # cut, not delivered after all this time
        client.close()


def test_many_idle_connections_hold_nobody_up(hello: RunningServer) -> None:
    files = psutil.Process().num_fds
    with contextlib.ExitStack() as stack:
        for index in range(200):
            idle = stack.enter_context(socket.create_connection(hello.address, timeout=10))
            if index % 2:
                idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert idle.recv(12) == b"HTTP/1.1 200"
        assert hello.complete().status_code == 200
        most = files()
    end = time.monotonic() + 10
    while files() > most - 2 * 200:  # both ends are of this process
        assert time.monotonic() < end
        time.sleep(0.01)


def head_and_body(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
def test_http_1_0_gets_bodies_that_end_with_the_connection(
    hello: RunningServer, more: bytes
) -> None:
    """nginx speaks it to upstreams unless it is told otherwise, and `ab` always."""
    fields = b"content-type: application/json\r\n" + more
    for stream in (b"false", b"true"):
        body = b'{"prompt": "Hi", "stream": %b}' % stream
        start = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n" % len(body)
        head, said = head_and_body(sent(hello, iter([start + fields + b"\r\n" + body]))[0])
        assert head.startswith(b"http/1.1 200")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        if stream == b"false":
            assert b"content-length: %d" % len(said) in head
            assert json.loads(said)["object"] == "text_completion"
        else:
            blocks = said.split(b"\n\n")
            assert all(block.startswith(b"data: ") for block in blocks[:-1])
            assert blocks[-2:] == [b"data: [DONE]", b""]
    for method in (b"GET", b"HEAD"):
        answer = sent(hello, iter([method + b" /health HTTP/1.0\r\n" + more + b"\r\n"]))[0]
        assert head_and_body(answer)[1] == b""
