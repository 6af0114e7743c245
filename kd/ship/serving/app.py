"""The web application: ``POST /predict``, ``/healthz``, ``/readyz``, ``/metrics``, and a page to try it; beside them
KServe's ``/v2`` and SageMaker's ``/ping`` and ``/invocations``."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kd.ship.export.base import Runtime
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving import open_inference
from kd.ship.serving.answers import answer
from kd.ship.serving.batcher import Batcher, Daemons
from kd.ship.serving.bodies import Busy, Limits, Refused, Room, Share, read_body, read_uploads
from kd.ship.serving.hosts import KnownHosts
from kd.ship.serving.metrics import Metrics
from kd.ship.serving.pictures import view
from kd.storage.shown import in_html

PAGE = Path(__file__).parent / "page.html"
RETRY_S = 1
BODIES = 16  # The bodies of all requests together are at most so many times a request's
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src blob: data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}
P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[Request], Awaitable[Response]]


class Server:
    """One student, and where wanted its teacher, behind HTTP. All models take pictures as the manifest says."""

    def __init__(
        self,
        manifest: ExportManifest,
        models: dict[str, Runtime],
        limits: Limits,
        hosts: Collection[str] = (),
    ) -> None:
        self.manifest, self.models, self.limits, self.hosts = manifest, models, limits, hosts
        self.metrics, self.ready, self.open_requests = Metrics(), False, 0
        given = limits.max_batch, limits.max_wait_ms / 1000, limits.queue, self.metrics
        self.batchers = {name: Batcher(model, *given) for name, model in models.items()}
        self._bytes, self._pictures = Room(BODIES * limits.max_upload_mb * 1e6), Room(limits.queue)
        self._decoders, self._free = (
            Daemons(limits.decoders, "decoder"),
            asyncio.Semaphore(limits.decoders),
        )

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """The application's life: starts the batchers, then is ready; at the end the batchers finish what waits."""
        for batcher in self.batchers.values():
            batcher.start()
        self.ready = True
        yield
        self.ready = False
        for batcher in self.batchers.values():
            await batcher.stop()

    async def _counted(self, work: Work, request: Request) -> Response:
        start = time.perf_counter()
        response = await self._answered(work, request)
        self.metrics.requests.labels(response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _answered(self, work: Work, request: Request) -> Response:
        if self.open_requests >= self.limits.queue:
            return _busy()
        self.open_requests += 1
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                return await work(request)
        except Refused as error:
            return _error(error.status, str(error))
        except Busy:
            return _busy()
        except TimeoutError:
            return _error(408, f"no answer within {self.limits.timeout_s:g} s")
        except ClientDisconnect:
            return _error(400, "the client is gone")
        finally:
            self.open_requests -= 1

    async def _predictions(self, request: Request) -> Response:
        top = _top(request.query_params.get("top", "5"))
        with Share(self._bytes) as share, Share(self._pictures) as pictures:
            uploads = await read_uploads(request, self.limits, share, self._elsewhere)
            pictures.take(len(uploads))
            views = [await self._view(name, data) for name, data in uploads]
            waiting = {
                name: [batcher.submit(v) for v in views] for name, batcher in self.batchers.items()
            }
            found = {name: await asyncio.gather(*futures) for name, futures in waiting.items()}
        predictions = []
        for i, (name, _) in enumerate(uploads):
            mine = self._answer(found["student"][i], top)
            if "teacher" in found:
                mine["teacher"] = self._answer(found["teacher"][i], top)
            predictions.append({"file": name, **mine})
        about = {"arch": self.manifest.arch, "task": self.manifest.task}
        return JSONResponse({**about, "predictions": predictions})

    async def _inferred(self, request: Request) -> Response:
        name, header = self._name(request), request.headers.get(open_inference.HEADER)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "Content-Encoding: compressed requests are not read")
        with Share(self._bytes) as share, Share(self._pictures) as pictures:
            body = await read_body(request, self.limits, share)
            asked = await self._elsewhere(
                open_inference.read, body, header, self.manifest, self.limits.max_pictures
            )
            pictures.take(len(asked.pictures))
            views = [
                await self._view(f"pictures[{i}]", picture)
                for i, picture in enumerate(asked.pictures)
            ]
            found = await asyncio.gather(*[self.batchers[name].submit(v) for v in views])
        return await self._elsewhere(
            open_inference.respond, asked, name, np.stack(found), self.manifest
        )

    def _name(self, request: Request) -> str:
        name, version = request.path_params["name"], request.path_params.get("version", "1")
        if name not in self.batchers or version != "1":
            known = ", ".join(self.batchers)
            raise Refused(
                404, f"no model {name[:40]!r} of version {version[:10]!r}; there is {known}"
            )
        return name

    def _answer(self, numbers: np.ndarray, top: int) -> dict[str, Any]:
        try:
            return answer(numbers, self.manifest, top)
        except ValueError as error:
            raise Refused(500, str(error)) from error

    async def _view(self, name: str, data: bytes | np.ndarray) -> np.ndarray:
        try:
            return await self._elsewhere(view, data, self.manifest, self.limits.max_pixels)
        except Refused as error:
            raise Refused(error.status, f"{name}: {error}") from error

    async def _elsewhere(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs in a decoder's thread. A call that hangs keeps its thread; calls that wait for one hold nothing else."""
        await self._free.acquire()
        future = asyncio.wrap_future(self._decoders.submit(call, *args, **kwargs))
        future.add_done_callback(self._is_free)
        return await asyncio.shield(future)

    def _is_free(self, future: "asyncio.Future[Any]") -> None:
        self._free.release()
        _ = future.cancelled() or future.exception()  # looked at: its request may have gone

    async def page(self, request: Request) -> Response:
        """``GET /``: a page on which one drops a picture."""
        about = {
            "arch": self.manifest.arch,
            "task": self.manifest.task,
            "classes": len(self.manifest.classes),
            "models": list(self.models),
        }
        text = PAGE.read_text(encoding="utf-8").replace("{{ABOUT}}", in_html(about))
        return HTMLResponse(text, headers=HEADERS)

    async def healthz(self, request: Request) -> Response:
        """``GET /healthz``: 200 as long as the process answers."""
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """``GET /v2/health/live`` of the Open Inference Protocol."""
        return JSONResponse({"live": True})

    async def about(self, request: Request) -> Response:
        """``GET /v2`` of the Open Inference Protocol: the server's name, version and extensions."""
        about = {
            "name": "kd-serve",
            "version": version("kd-train"),
            "extensions": [open_inference.EXTENSION],
        }
        return JSONResponse(about)

    async def model(self, request: Request) -> Response:
        """``GET /v2/models/NAME`` and ``.../ready``: metadata and readiness of a model; 404 for an unknown name."""
        try:
            name = self._name(request)
        except Refused as error:
            return _error(error.status, str(error))
        if request.url.path.endswith("/ready"):
            return JSONResponse({"name": name, "ready": self.ready}, 200 if self.ready else 503)
        return JSONResponse(open_inference.metadata(name, self.manifest))

    async def readyz(self, request: Request) -> Response:
        """``GET /readyz``: 200 while requests are taken, else 503 (before the start and while stopping)."""
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def numbers(self, request: Request) -> Response:
        """``GET /metrics``: the metrics in Prometheus' text format."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def app(self) -> Starlette:
        """The ASGI application with all routes; hosts other than ``hosts`` are refused."""
        pages = dict.fromkeys(("/readyz", "/ping", "/v2/health/ready"), self.readyz)
        pages |= {"/": self.page, "/healthz": self.healthz, "/metrics": self.numbers}
        pages |= {"/v2": self.about, "/v2/health/live": self.live}
        predictions, inferred = (
            partial(self._counted, self._predictions),
            partial(self._counted, self._inferred),
        )
        posts = {"/predict": predictions, "/invocations": predictions}
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            pages |= {model: self.model, f"{model}/ready": self.model}
            posts[f"{model}/infer"] = inferred
        routes = [Route(*page) for page in pages.items()]
        routes += [Route(*post, methods=["POST"]) for post in posts.items()]
        middleware = [Middleware(KnownHosts, names=self.hosts)]
        handlers = {HTTPException: _refused}  # no such path or method
        return Starlette(
            routes=routes, middleware=middleware, lifespan=self.life, exception_handlers=handlers
        )


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these alone"
    return _error(error.status_code, error.detail, dict(error.headers or {}))


def _busy() -> Response:
    return _error(503, "too many pictures wait: try again", {"Retry-After": str(RETRY_S)})


def _top(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 0 < int(text) <= 1000):
        raise Refused(400, f"top: must be a whole number from 1 to 1000, got '{text[:20]}'")
    return int(text)
