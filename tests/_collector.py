"""An OTLP collector of the tests' own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest


class Receiver(BaseHTTPRequestHandler):
    """An OTLP collector: keeps what is posted."""

    bodies: list[bytes] = []  # noqa: RUF012 (the test reads it)
    paths: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        Receiver.paths.append(self.path)
        Receiver.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture()
def collector() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
