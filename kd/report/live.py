"""``kd-report --live``: the pages of runs while they train, from their records; on the loopback interface."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kd.report.charts import table
from kd.report.html import finite, page
from kd.report.metric import format_metric
from kd.report.records import is_run, read_run
from kd.report.rules import Explained
from kd.report.sections import report, status

EVERY_S = 2.0  # between two requests of a page
HOSTS = ("127.0.0.1", "localhost")  # another name in a request comes from a page elsewhere


class Live(ThreadingHTTPServer):
    """Serves the runs below a folder, or one run.

    Args:
        folder: of runs, or of a run.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder.resolve()
        self.address = f"http://127.0.0.1:{self.server_port}/"
        self._kept: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def content(self, name: str) -> dict[str, Any] | None:
        """What a page shows: of a run, or the list of all; ``None``: unknown name."""
        if not name and not is_run(self.folder):
            return self._list()
        folder = (self.folder / name).resolve()
        if not folder.is_relative_to(self.folder) or not is_run(folder):
            return None
        stamp = max(map(_changed, (folder, *folder.glob("*.*"), *folder.glob("records/*"))))
        if self._kept.get(folder, (None,))[0] != stamp:
            title = f"{folder.parent.name} {folder.name}"
            sections = report(Explained(read_run(folder)))
            self._kept[folder] = stamp, {"title": title, "sections": sections, "every": EVERY_S}
        return self._kept[folder][1]

    def _list(self) -> dict[str, Any]:
        found = [
            f
            for f in (*self.folder.glob("*/*"), *self.folder.glob("*"))
            if not f.is_symlink() and is_run(f)
        ]
        rows = []
        for folder in sorted(found, key=_changed, reverse=True)[:50]:
            one = Explained(read_run(folder))
            name, best = (
                folder.relative_to(self.folder).as_posix(),
                one.facts.best_val(one.run.students[0]),
            )
            rows.append(
                [name, status(one.run), format_metric(one.run.primary, best), one.verdict["text"]]
            )
        columns = ["run", "status", "best", "verdict"]
        runs = table("Runs", columns, rows, links=True, long=True, empty="None yet.")
        return {"title": str(self.folder), "sections": [runs], "every": 5 * EVERY_S}


def _changed(path: Path) -> int:
    """When a file was changed, in ns; 0 for one that a run has just renamed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class Handler(BaseHTTPRequestHandler):
    """Answers ``GET /RUN`` with the run's page, and ``GET /RUN?json`` with its content."""

    server: Live
    """Finds the runs and their content."""

    def do_GET(self) -> None:
        """A page or its content; 404 for an unknown run, and for a foreign ``Host`` (DNS rebinding)."""
        name, _, query = self.path.partition("?")
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        content = self.server.content(unquote(name).strip("/")) if host in HOSTS else None
        if content is None:
            self.send_error(404, "no such run")
            return
        sent = (json.dumps(finite(content)) if query == "json" else page(content)).encode()
        kind = "application/json" if query == "json" else "text/html"
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        """Logs nothing: a page asks every two seconds."""
