"""``kd-report --live``: the pages of runs while they train, from their records; on the loopback interface."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from kd.report.charts import table
from kd.report.html import finite, page
from kd.report.metric import duration, format_metric
from kd.report.records import is_run, read_run
from kd.report.rules import Explained
from kd.report.sections import epoch_in_words, report, status, verdict_of

EVERY_S = 2.0  # between two requests of a page
MOST = 50  # runs that the list shows, the newest
HOSTS = ("127.0.0.1", "localhost")  # another name in a request comes from a page elsewhere


class _Page(NamedTuple):
    """A run's page."""

    changed: int
    """The newest change of the run's folder, its files and records, Unix time in ns."""
    content: dict[str, Any]
    """Its title and sections."""


class Live(ThreadingHTTPServer):
    """Serves the runs below a folder, or one run.

    Args:
        folder: of runs, or of a run.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Opens the port; :meth:`serve_forever` answers.

        Args:
            folder: of one run, or of many.
            port: 0: any that is free.
        """
        host = HOSTS[0]
        super().__init__((host, port), Handler)
        self.folder = folder.resolve()
        self.address = f"http://{host}:{self.server_port}/"
        self._pages: dict[Path, _Page] = {}
        """The newest page of each run's folder."""

    def content(self, name: str) -> dict[str, Any] | None:
        """What a page shows: of a run, or the list of all. Called in a thread of its own for each request.

        A run's page is worked out again only when a file in its folder, or among its records, has changed.

        Args:
            name: the run's folder below the served one; "": the list, or the one run that is served.

        Returns:
            Title and sections; None for an unknown name, and for one that leads out of the folder.
        """
        if not name and not is_run(self.folder):
            return self._list()
        folder = (self.folder / name).resolve()
        if not folder.is_relative_to(self.folder) or not is_run(folder):
            return None
        newest_change = _changed(folder)
        for pattern in ("*.*", "records/*"):
            for file in folder.glob(pattern):
                newest_change = max(newest_change, _changed(file))
        page = self._pages.get(folder)
        if page is None or page.changed != newest_change:
            sections = report(Explained(read_run(folder)))
            title = f"{folder.parent.name} {folder.name}"
            content = {"title": title, "sections": sections, "every": EVERY_S}
            page = _Page(newest_change, content)
            self._pages[folder] = page
        return page.content

    def _list(self) -> dict[str, Any]:
        """The page of all runs: a row for each of the :data:`MOST` newest, reloaded by the browser."""
        folders = []
        for folder in (*self.folder.glob("*/*"), *self.folder.glob("*")):
            if not folder.is_symlink() and is_run(folder):
                folders.append(folder)
        folders.sort(key=_changed, reverse=True)
        rows = []
        for folder in folders[:MOST]:
            explained = Explained(read_run(folder))
            run = explained.run
            facts = explained.facts
            metric = run.primary
            best = format_metric(metric, facts.best_val(run.students[0]))
            taught = format_metric(metric, (run.teacher.get("val") or {}).get(metric))
            row = [
                folder.relative_to(self.folder).as_posix(),
                status(run),
                epoch_in_words(facts),
                duration(facts.left_s),
                f"{metric} {best}" if best else "",
                taught,
                verdict_of(explained)["text"],
            ]
            rows.append(row)
        columns = ["run", "status", "epoch", "time left", "student", "teacher", "verdict"]
        runs = table("Runs", columns, rows, links=True, long=True, empty="None yet.")
        return {"title": str(self.folder), "sections": [runs], "every": 5 * EVERY_S}


def _changed(path: Path) -> int:
    """When a file or folder was changed, Unix time in ns; 0 for a file that a run has just renamed."""
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
        host_and_port = self.headers.get("Host", "")
        host = host_and_port.rpartition(":")[0] or host_and_port
        content = None
        if host in HOSTS:
            content = self.server.content(unquote(name).strip("/"))
        if content is None:
            self.send_error(404, "no such run")
            return
        if query == "json":
            kind = "application/json"
            text = json.dumps(finite(content))
        else:
            kind = "text/html"
            text = page(content)
        sent = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        """Logs nothing: a page asks every two seconds."""
