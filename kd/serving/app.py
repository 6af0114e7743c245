"""The web application: ``POST /predict``, ``/healthz``, ``/readyz``, ``/metrics``, and a page to try it."""

import asyncio
import base64
import binascii
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kd.export.base import Runtime
from kd.export.manifest import Manifest
from kd.serving.answers import answer
from kd.serving.batcher import Batcher, Busy
from kd.serving.metrics import Metrics
from kd.serving.pictures import BadUpload, view

PAGE = Path(__file__).parent / "page.html"
RETRY_S = 1
DROPPED = 8
"""A body of so many times the limit is cut off."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src blob: data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        max_batch: pictures that the model runs at a time.
        max_wait_ms: so long a batch waits for company.
        queue: pictures that may wait for the model, and requests that are answered at a time.
        timeout_s: of a request, from its first byte to its answer.
        max_upload_mb: of a request's body.
        max_pixels: of a decoded picture.
        max_pictures: of a request.
        decoders: threads that decode.
    """

    max_batch: int = 16
    max_wait_ms: float = 2.0
    queue: int = 512
    timeout_s: float = 30.0
    max_upload_mb: float = 16.0
    max_pixels: int = 40_000_000
    max_pictures: int = 32
    decoders: int = 2


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of the answer.
        reason: in words.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Server:
    """One student, and its teacher beside it where asked.

    Args:
        manifest: of the student.
        models: ``student`` and, maybe, ``teacher``: both take what the manifest says.
        limits: what is taken.
    """

    def __init__(self, manifest: Manifest, models: dict[str, Runtime], limits: Limits) -> None:
        self.manifest, self.models, self.limits = manifest, models, limits
        self.metrics, self.ready, self.open_requests = Metrics(), False, 0
        wait = limits.max_wait_ms / 1000
        self.batchers = {
            name: Batcher(model, limits.max_batch, wait, limits.queue, self.metrics) for name, model in models.items()
        }
        self._decoders = ThreadPoolExecutor(limits.decoders, "decoder")

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """Warms the models up, then is ready; at the end finishes what waits."""
        for model in self.models.values():
            await asyncio.to_thread(model, np.zeros((1, *self.manifest.shape), np.uint8))
        for batcher in self.batchers.values():
            batcher.start()
        self.ready = True
        yield
        self.ready = False
        for batcher in self.batchers.values():
            await batcher.stop()
        self._decoders.shutdown()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Answers or refuses; counts either."""
        start = time.perf_counter()
        response = await self._answered(request)
        self.metrics.requests.labels(response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _answered(self, request: Request) -> Response:
        if self.open_requests >= self.limits.queue:
            return _busy()
        self.open_requests += 1
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                return JSONResponse(await self._predictions(request))
        except (Refused, BadUpload) as error:
            return _error(error.status, str(error))
        except Busy:
            return _busy()
        except TimeoutError:
            return _error(408, f"no answer within {self.limits.timeout_s:g} s")
        except ClientDisconnect:
            return _error(400, "the client is gone")
        finally:
            self.open_requests -= 1

    async def _predictions(self, request: Request) -> dict[str, Any]:
        top = _top(request.query_params.get("top", "5"))
        uploads = await read_uploads(request, self.limits)
        if not all(batcher.room(len(uploads)) for batcher in self.batchers.values()):
            raise Busy
        views = [await self._view(name, data) for name, data in uploads]
        waiting = {name: [batcher.submit(v) for v in views] for name, batcher in self.batchers.items()}
        found = {name: await asyncio.gather(*futures) for name, futures in waiting.items()}
        predictions = []
        for i, (name, _) in enumerate(uploads):
            mine = answer(found["student"][i], self.manifest, top)
            if "teacher" in found:
                mine["teacher"] = answer(found["teacher"][i], self.manifest, top)
            predictions.append({"file": name, **mine})
        return {"arch": self.manifest.arch, "task": self.manifest.task, "predictions": predictions}

    async def _view(self, name: str, data: bytes) -> np.ndarray:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._decoders, view, data, self.manifest, self.limits.max_pixels)
        except BadUpload as error:
            raise BadUpload(error.status, f"{name}: {error}") from error

    async def page(self, request: Request) -> Response:
        """A page to drop a picture on."""
        about = {
            "arch": self.manifest.arch, "task": self.manifest.task, "classes": len(self.manifest.classes),
            "models": list(self.models),
        }  # fmt: skip
        text = json.dumps(about).replace("<", "\\u003c")
        return HTMLResponse(PAGE.read_text(encoding="utf-8").replace("{{ABOUT}}", text), headers=HEADERS)

    async def healthz(self, request: Request) -> Response:
        """The process lives."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Requests are taken."""
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def numbers(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.numbers),
        ]
        return Starlette(routes=routes, lifespan=self.life)


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


def _busy() -> Response:
    return _error(503, "too many pictures wait: try again", {"Retry-After": str(RETRY_S)})


def _top(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1000):
        raise Refused(400, f"top: must be a whole number from 1 to 1000, got '{text[:20]}'")
    return int(text)


# -- bodies ------------------------------------------------------------------------------------------------------------


async def read_uploads(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    """The pictures of a request, by name; never more bytes in memory than the limit.

    Raises:
        Refused: too large, too many, or neither multipart nor JSON with pictures.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = await _multipart(request, limits)
    elif kind == "application/json":
        found = _from_json(b"".join([part async for part in _bounded(request, limits)]))
    else:
        raise Refused(415, "send multipart/form-data with files, or application/json with base64 'images'")
    if not found:
        raise Refused(400, "no pictures in the request")
    if len(found) > limits.max_pictures:
        raise Refused(413, f"{len(found)} pictures are more than {limits.max_pictures} a request")
    return found


async def _bounded(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """The body's parts. What is over the limit is read and dropped: few clients read before they have sent."""
    seen, most = 0, limits.max_upload_mb * 1e6
    async for part in request.stream():
        seen += len(part)
        if seen > DROPPED * most:
            break
        if seen <= most:
            yield part
    if seen > most:
        raise Refused(413, f"the request is larger than {limits.max_upload_mb:g} MB")


async def _multipart(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    parser = MultiPartParser(
        request.headers,
        _bounded(request, limits),  # type: ignore[arg-type]
        max_files=limits.max_pictures + 1,
        max_fields=100,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise Refused(400, f"the form can't be read: {getattr(error, 'message', error)}") from error
    async with _closing(form):
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [(file.filename or f"picture {i}", await file.read()) for i, file in enumerate(files)]


@asynccontextmanager
async def _closing(form: FormData) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await form.close()


def _from_json(body: bytes) -> list[tuple[str, bytes]]:
    try:
        content = json.loads(body)
        pictures = content["images"] if "images" in content else [content["image"]]
        assert isinstance(pictures, list) and all(isinstance(picture, str) for picture in pictures)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise Refused(400, 'the JSON must be {"images": ["BASE64", ...]} or {"image": "BASE64"}') from error
    return [(f"picture {i}", _decoded(i, text)) for i, text in enumerate(pictures)]


def _decoded(i: int, text: str) -> bytes:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(400, f"picture {i} is not base64") from error
