"""A small HTTP proxy in front of a server, which can be made slow, or pointed at another server."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import httpx

PASSED = ("content-type", "etag", "x-request-id")


class DelayingProxy:
    """Answers of `target`, each `delay_s` later. 502 when the target does not answer."""

    def __init__(self, target: str) -> None:
        self.target, self.delay_s = target, 0.0
        self._http = httpx.Client(timeout=20)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._pass_on(self)

            do_POST = do_PATCH = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._http.close()

    def _pass_on(self, call: BaseHTTPRequestHandler) -> None:
        time.sleep(self.delay_s)
        body = call.rfile.read(int(call.headers.get("content-length") or 0))
        wanted = ("content-type", "if-match", "if-none-match", "authorization")
        headers = {name: value for name, value in call.headers.items() if name.lower() in wanted}
        try:
            answer = self._http.request(call.command, self.target + call.path, content=body, headers=headers)
        except httpx.HTTPError:
            call.send_error(502)
            return
        call.send_response(answer.status_code)
        for name in PASSED:
            if name in answer.headers:
                call.send_header(name, answer.headers[name])
        call.send_header("content-length", str(len(answer.content)))
        call.end_headers()
        call.wfile.write(answer.content)
