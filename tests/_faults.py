"""An S3 server that fails now and then, in front of one that does not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

from tests._http import Handler, http_server


class Faults:
    """What goes wrong, and what went through.

    Args:
        method: of the requests that may fail.
        part: of their paths.

    Attributes:
        often: of these requests every such many fails, in turn by an error 500, a cut and a slow answer; 0: none.
        seen: ranges that they asked for.
    """

    def __init__(self, method: str = "GET", part: str = ".tar") -> None:
        self.method, self.part, self.often = method, part, 0
        self.seen: list[str] = []
        self.failed = {"error": 0, "cut": 0, "slow": 0}
        self._lock = threading.Lock()

    def next(self, method: str, path: str, asked: str) -> str:
        """What happens to a request: nothing, or one of the faults."""
        if method != self.method or self.part not in path:
            return ""
        with self._lock:
            self.seen.append(asked)
            if not self.often or len(self.seen) % self.often:
                return ""
            kind = list(self.failed)[len(self.seen) // self.often % 3]
            self.failed[kind] += 1
            return kind


@contextmanager
def before(port: int, faults: Faults) -> Iterator[int]:
    """The port of a server that passes on to ``port`` what does not fail."""

    class Between(Handler):
        protocol_version = "HTTP/1.1"  # answers those who ask before they send a body

        def _pass(self) -> None:
            body = self.posted()
            fault = faults.next(self.command, self.path, self.headers.get("Range", ""))
            if fault == "error":
                self.reply(500)
                return
            if fault == "slow":
                threading.Event().wait(0.2)
            behind = HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() != "expect"
            }
            behind.request(self.command, self.path, body, headers)
            answer = behind.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in (
                    "transfer-encoding",
                    "connection",
                    "content-length",
                    "server",
                    "date",
                ):
                    self.send_header(name, value)
            length = (
                answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            )
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if fault == "cut":
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    with http_server(Between) as server:
        yield server.server_port
