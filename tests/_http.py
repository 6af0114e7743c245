"""HTTP servers of the tests' own, on this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Prints nothing; reads and replies in a line."""

    def log_message(self, *_: object) -> None:
        """Silent."""

    def posted(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", with_body: bool = True, **more: str) -> None:
        """Sends a status, ``more`` headers (``_`` for ``-``), the body's length, and the body."""
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def http_server(handler: type[Handler], **attributes: Any) -> Iterator[Any]:
    """Inside, a server with these attributes answers; ``.address`` is its URL."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.address = f"http://127.0.0.1:{server.server_port}"
    for name, value in attributes.items():
        setattr(server, name, value)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
