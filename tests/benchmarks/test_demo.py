import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import demo


def start(code: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, "-uc", code], stdout=sink, stderr=sink, start_new_session=True
        )


def test_a_server_that_dies_while_starting_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    server = start("raise SystemExit(3)", tmp_path / "log")
    with pytest.raises(SystemExit, match="status 3"):
        demo.wait_until_ready(server, tmp_path / "log")


def test_the_port_is_read_from_the_log(tmp_path: Path) -> None:
    code = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), type("Ok", (http.server.BaseHTTPRequestHandler,), {
    "do_GET": lambda self: (self.send_response(200), self.end_headers())}))
print(f"x: http://127.0.0.1:{server.server_port}/v1 is up, the model is loading", flush=True)
server.serve_forever()
"""
    server = start(code, tmp_path / "log")
    try:
        url = demo.wait_until_ready(server, tmp_path / "log")
        assert demo.is_ready(url)
    finally:
        assert demo.stop(server) != 0
    assert server.poll() is not None
    assert not demo.is_ready(url)


def test_rates_leave_the_first_token_out() -> None:
    assert demo.Answer(num_tokens=11, ttft_s=1.0, duration_s=3.0).rate == "5 tokens/s"


def test_an_answer_that_came_in_one_piece_has_no_rate() -> None:
    assert demo.Answer(num_tokens=11, ttft_s=1.0, duration_s=1.0).rate == "too short to measure"


def test_text_that_never_came_fails_the_demo() -> None:
    with pytest.raises(SystemExit, match="no text"):
        demo.finish("the chat", 0.0, None, 0)
