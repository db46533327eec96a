"""Over a real socket: sizes refused before they are read, slow clients, and what a client leaves behind."""

import socket
import time

import httpx
import pytest

from control_plane import limits
from tests.control_plane.conftest import Running, make_config, running
from tests.control_plane.fake_engine import FakeEngine
from tests.patience import PATIENCE_S, until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def post(live: Running, body: bytes) -> socket.socket:
    connection = live.connect()
    connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_large_content_length_is_refused_before_the_body(live: Running) -> None:
    with live.connect() as connection:
        connection.sendall(f"{HEAD}Content-Length: 40000000\r\n\r\n".encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in answer


@pytest.mark.parametrize("length", ["-1", "abc", "9" * 30])
def test_wrong_content_length_is_refused(live: Running, length: str) -> None:
    with live.connect() as connection:
        connection.sendall(f"{HEAD}Content-Length: {length}\r\n\r\n".encode())
        assert read_all(connection)[9:12] in (b"400", b"413")


def test_a_40_mb_body_gets_413_through_a_client(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 20)
    start = time.monotonic()
    answer = httpx.post(f"{live.base_url}/v1/completions", content=b"x" * 40_000_000, timeout=PATIENCE_S)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert time.monotonic() - start < limits.LINGER_S  # the end is the body's, not the limit's


def test_chunked_bodies_are_counted(live: Running) -> None:
    with live.connect() as connection:
        connection.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(18):  # 64 KiB each, over the limit of 1 MiB
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_chunked_bodies_work(live: Running) -> None:
    body = b'{"model":"fake","prompt":"abc"}'
    pieces = (body[i : i + 5] for i in range(0, len(body), 5))
    answer = httpx.post(
        f"{live.base_url}/v1/completions", content=pieces, headers={"Content-Type": "application/json"}
    )
    assert answer.json()["choices"][0]["text"] == "abc"


def test_head_is_bounded(live: Running) -> None:
    with live.connect() as connection:
        connection.sendall(f"{HEAD}X: {'y' * 200_000}".encode())
        assert read_all(connection).startswith(b"HTTP/1.1 431")
    with live.connect() as connection:
        connection.sendall((HEAD + "".join(f"X{i}: y\r\n" for i in range(200)) + "\r\n").encode())
        assert connection.recv(12) == b"HTTP/1.1 431"


def test_slow_head_and_slow_body_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(limits.BodyLimit.__init__, "__defaults__", (0.3,))
    with running(FakeEngine()) as live:
        with live.connect() as connection:
            connection.sendall(b"POST /v1/comp")
            assert read_all(connection).startswith(b"HTTP/1.1 408")
        with live.connect() as connection:
            connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
            assert read_all(connection).startswith(b"HTTP/1.1 408")
        with live.connect() as connection:  # an idle connection that sent nothing
            assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_kept_connection_outlives_the_head_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 1.5)
    with running(FakeEngine()) as live, httpx.Client(base_url=live.base_url) as client:
        assert client.get("/version").status_code == 200
        for _ in range(2):
            time.sleep(0.9)
            assert client.get("/version").status_code == 200


def test_stream_bytes(live: Running) -> None:
    with post(live, b'{"model":"fake","prompt":"ab","stream":true}') as connection:
        connection.settimeout(PATIENCE_S)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head
    assert body.count(b"data: {") == 3
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", ["true", "false"])
def test_disconnect_frees_the_request(stream: str) -> None:
    engine = FakeEngine(step_s=0.3)
    with running(engine) as live:
        body = (
            '{"model":"fake","prompt":"ab","n":2,"max_tokens":4000,"ignore_eos":true,"stream":' + stream + "}"
        )
        with post(live, body.encode()):
            until(lambda: engine.num_held == 2)
        left_at = engine.num_steps
        until(lambda: engine.num_held == 0)
        assert engine.num_steps - left_at <= 5
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)
        until(lambda: live.service.num_open == 0)


def test_a_client_that_does_not_read_blocks_nobody_and_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_S", 0.5)
    engine = FakeEngine(step_s=0.005)
    with running(engine) as live:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", live.port))
        fields = b'"max_tokens":4000,"ignore_eos":true,"stream":true,"n":16,"logprobs":20'
        body = b'{"model":"fake","prompt":"ab",%s}' % fields
        lazy.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: bool(engine.submitted))
        start = time.monotonic()
        for _ in range(5):
            answer = httpx.post(f"{live.base_url}/v1/completions", json={"model": "fake", "prompt": "abc"})
            assert answer.status_code == 200
        assert time.monotonic() - start < 15  # the lazy one's answer takes 20 s
        until(lambda: live.service.num_open == 0)
        lazy.close()


def test_smaller_limit_is_obeyed() -> None:
    with running(FakeEngine(), make_config(max_body_size="1KB")) as live:
        url = f"{live.base_url}/v1/completions"
        assert httpx.post(url, json={"model": "fake", "prompt": "a" * 2000}).status_code == 413
        assert httpx.post(url, json={"model": "fake", "prompt": "a" * 200}).status_code == 200
