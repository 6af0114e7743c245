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

from kd.ship.cascade_rule import CascadeRule
from kd.ship.export.base import Runtime
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving import open_inference
from kd.ship.serving.answers import answer, probabilities
from kd.ship.serving.batcher import Batcher, Daemons
from kd.ship.serving.bodies import Busy, Refused, Room, Share, read_body, read_uploads
from kd.ship.serving.hosts import KnownHosts
from kd.ship.serving.limits import Limits
from kd.ship.serving.metrics import Metrics
from kd.ship.serving.pictures import view
from kd.storage.shown import in_html

PAGE = Path(__file__).parent / "page.html"
RETRY_S = 1
"""Seconds after which a refused client may ask again."""
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
    """One student, and where wanted its teacher, behind HTTP.

    Args:
        manifest: what all models take and answer.
        models: what runs each, by name: ``student``, and ``teacher`` where it is served under ``/v2`` too.
        limits: what is accepted.
        hosts: names by which the server may be reached, in lower case, beside ``localhost`` and IP addresses.
        rule: the teacher answers the pictures of which the student is not sure; None: the student answers all.
    """

    def __init__(
        self,
        manifest: ExportManifest,
        models: dict[str, Runtime],
        limits: Limits,
        hosts: Collection[str] = (),
        rule: CascadeRule | None = None,
    ) -> None:
        """Makes the batchers, the decoders' threads and what bounds their memory; the arguments are the class's.

        No model runs before the application starts (:meth:`life`).
        """
        self.rule = rule
        self.manifest = manifest
        self.limits = limits
        self.hosts = hosts
        self.metrics = Metrics()
        self.ready = False
        self.open_requests = 0
        self.batchers = {
            name: Batcher(model, limits, self.metrics) for name, model in models.items()
        }
        self._bytes = Room(BODIES * limits.max_upload_mb * 1e6)
        self._pictures = Room(limits.queue)
        self._decoders = Daemons(limits.decoders, "decoder")
        self._free_decoders = asyncio.Semaphore(limits.decoders)

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """The application's life: starts the batchers, then is ready; at the end the batchers finish what waits."""
        for batcher in self.batchers.values():
            batcher.start()
        self.ready = True
        yield
        self.ready = False
        await asyncio.gather(*[batcher.stop() for batcher in self.batchers.values()])

    async def _counted(self, work: Work, request: Request) -> Response:
        """Does a request's work, and counts its status and seconds for ``/metrics``."""
        start = time.perf_counter()
        code = 500  # of an error that is raised through here: Starlette logs it, and answers so
        try:
            response = await self._answered(work, request)
            code = response.status_code
        finally:
            self.metrics.requests.labels(code).inc()
            self.metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _answered(self, work: Work, request: Request) -> Response:
        """Does a request's work within the limits; what fails becomes a response with its status.

        What the request itself has wrong is 4xx, no answer in time 408, a full server 503. An error of the model is not
        caught here: :meth:`_counted` counts it as 500.
        """
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

    async def _predict(self, request: Request) -> Response:
        """``POST /predict`` and ``/invocations``: pictures in, answers out.

        JSON: ``arch``, ``task`` and ``predictions``, of each picture ``file`` (its name) and what
        :func:`~kd.ship.serving.answers.answer` gives of the student's numbers; with a rule ``by`` names who has answered.
        """
        top = _top(request.query_params.get("top", "5"))
        with Share(self._bytes) as share, Share(self._pictures) as pictures:
            uploads = await read_uploads(request, self.limits, share, self._in_decoder)
            pictures.take(len(uploads))
            views = [await self._view(name, data) for name, data in uploads]
            answered = await self._answers(views)

        predictions = []
        for (file, _), (name, numbers) in zip(uploads, answered, strict=True):
            prediction: dict[str, Any] = {"file": file}
            if self.rule is not None:
                prediction["by"] = name
            try:
                prediction |= answer(numbers, self.manifest, top)
            except ValueError as error:  # numbers that the manifest does not allow
                raise Refused(500, str(error)) from error
            predictions.append(prediction)
        about = {"arch": self.manifest.arch, "task": self.manifest.task}
        return JSONResponse({**about, "predictions": predictions})

    async def _answers(self, views: list[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """The name of the model that answers each picture, and its numbers: the student, or with a rule the teacher where
        the rule asks it. With a rule ``/metrics`` counts who has answered.

        Args:
            views: uint8, one of each picture.
        """
        students = await self._run("student", views)
        if self.rule is None:
            return [("student", student) for student in students]
        asks = self.rule.asks(probabilities(np.stack(students), self.manifest)).tolist()
        unsure = [picture for picture, asked in zip(views, asks, strict=True) if asked]
        teachers = iter(await self._run("teacher", unsure))
        answers = []
        for student, asked in zip(students, asks, strict=True):
            name, numbers = "student", student
            if asked:
                name, numbers = "teacher", next(teachers)
            self.metrics.answers.labels(name).inc()
            answers.append((name, numbers))
        return answers

    async def _run(self, name: str, views: list[np.ndarray]) -> list[np.ndarray]:
        """A model's numbers for each picture, in their order; raises ``Busy`` where too many pictures wait for it."""
        submit = self.batchers[name].submit
        return await asyncio.gather(*[submit(picture) for picture in views])

    async def _infer(self, request: Request) -> Response:
        """``POST /v2/models/NAME/infer`` of the Open Inference Protocol: tensors in, one model's tensors out.

        Raises:
            Refused: unknown model (404), compressed (415), or as of :func:`read_request`, :meth:`_view` and :func:`respond`.
            Busy: no room for the body, or too many pictures wait.
        """
        name = self._name(request)
        header = request.headers.get(open_inference.HEADER)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "Content-Encoding: compressed requests are not read")
        with Share(self._bytes) as share, Share(self._pictures) as pictures:
            body = await read_body(request, self.limits, share)
            inference = await self._in_decoder(
                open_inference.read_request, body, header, self.manifest, self.limits.max_pictures
            )
            pictures.take(len(inference.pictures))
            views = []
            for i, picture in enumerate(inference.pictures):
                if inference.are_views and not isinstance(picture, bytes):
                    views.append(picture)
                else:
                    views.append(await self._view(f"pictures[{i}]", picture))
            answers = await self._run(name, views)
        return await self._in_decoder(
            open_inference.respond, inference, name, np.stack(answers), self.manifest
        )

    def _name(self, request: Request) -> str:
        """The model that a path names, ``student`` or ``teacher``.

        Raises:
            Refused: 404, unknown, or of another version than 1.
        """
        name = request.path_params["name"]
        version = request.path_params.get("version", "1")
        if name not in self.batchers or version != "1":
            known = ", ".join(self.batchers)
            raise Refused(
                404, f"no model {name[:40]!r} of version {version[:10]!r}; there is {known}"
            )
        return name

    async def _view(self, name: str, data: bytes | np.ndarray) -> np.ndarray:
        """An uploaded picture as the model's view, made in a decoder thread; errors begin with the picture's name."""
        try:
            return await self._in_decoder(view, data, self.manifest, self.limits.max_pixels)
        except Refused as error:
            raise Refused(error.status, f"{name}: {error}") from error

    async def _in_decoder(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs ``call`` in a decoder's thread, once one is free, and returns its result. A request that is cut off does not
        stop its call: the thread is free again when the call has ended.
        """
        await self._free_decoders.acquire()
        future = asyncio.wrap_future(self._decoders.submit(call, *args, **kwargs))
        future.add_done_callback(self._release_decoder)
        return await asyncio.shield(future)

    def _release_decoder(self, future: "asyncio.Future[Any]") -> None:
        """Called in the event loop when a decoder's call has ended, also after its request has gone."""
        self._free_decoders.release()
        if not future.cancelled():
            future.exception()  # read, so that asyncio does not warn of it where the request has gone

    async def page(self, request: Request) -> Response:
        """``GET /``: a page of HTML on which one drops a picture; it shows what the manifest says of the model."""
        about = {
            "arch": self.manifest.arch,
            "task": self.manifest.task,
            "classes": len(self.manifest.classes),
        }
        text = PAGE.read_text(encoding="utf-8").replace("{{ABOUT}}", in_html(about))
        return HTMLResponse(text, headers=HEADERS)

    async def live(self, request: Request) -> Response:
        """``GET /healthz``, and ``/v2/health/live`` of the Open Inference Protocol: 200 as long as the process answers."""
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
        name = self._name(request)
        if request.url.path.endswith("/ready"):
            status = 200 if self.ready else 503
            return JSONResponse({"name": name, "ready": self.ready}, status)
        metadata = open_inference.metadata(name, self.manifest)
        return JSONResponse(metadata)

    async def readyz(self, request: Request) -> Response:
        """``GET /readyz``: 200 while requests are taken, else 503 (before the start and while stopping)."""
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def numbers(self, request: Request) -> Response:
        """``GET /metrics``: the metrics in Prometheus' text format."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def app(self) -> Starlette:
        """The ASGI application with all routes; hosts other than ``hosts`` are refused."""
        gets = {
            "/": self.page,
            "/healthz": self.live,
            "/readyz": self.readyz,
            "/ping": self.readyz,
            "/metrics": self.numbers,
            "/v2": self.about,
            "/v2/health/live": self.live,
            "/v2/health/ready": self.readyz,
        }
        posts = {"/predict": self._predict, "/invocations": self._predict}
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            gets[model] = self.model
            gets[f"{model}/ready"] = self.model
            posts[f"{model}/infer"] = self._infer
        routes = [Route(path, page) for path, page in gets.items()]
        for path, work in posts.items():
            routes.append(Route(path, partial(self._counted, work), methods=["POST"]))
        return Starlette(
            routes=routes,
            middleware=[Middleware(KnownHosts, names=self.hosts)],
            lifespan=self.life,
            exception_handlers={HTTPException: _http_error, Refused: _refused},
        )


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


def _http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Starlette's own errors: no such path or method."""
    assert isinstance(error, HTTPException), "registered for these alone"
    return _error(error.status_code, error.detail, dict(error.headers or {}))


def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """A Refused of one of the pages that are read (GET), which :meth:`Server._answered` does not see."""
    assert isinstance(error, Refused), "registered for these alone"
    return _error(error.status, str(error))


def _busy() -> Response:
    return _error(503, "too many pictures wait: try again", {"Retry-After": str(RETRY_S)})


def _top(text: str) -> int:
    """How many labels a client wants, from its query ``?top=``; raises a Refused (400) for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 0 < int(text) <= 1000):
        raise Refused(400, f"top: must be a whole number from 1 to 1000, got '{text[:20]}'")
    return int(text)
