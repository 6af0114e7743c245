"""A teacher behind an address, which ``kd-cache from=URL`` asks for answers: a server of the KServe v2 protocol."""

import hashlib
import http.client
import json
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kd.errors import UserError
from kd.settings import AskSettings
from kd.storage.elsewhere import json_of

CHAT = "/chat/completions"
"""How the path of a chat endpoint ends (:mod:`kd.teachers.chat`)."""
HEADER = "Inference-Header-Content-Length"
"""The header of a body in which binary tensors follow the JSON: its value is the JSON's length in bytes."""
LARGEST_ANSWER = 2**30
"""Bytes of a response that are read."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which the same request is sent again."""
LONGEST_WAIT_S = 30.0
"""Seconds between two tries of a request."""


class AnswerServer:
    """Asks a server of the KServe v2 protocol (``kd-serve RUN teacher=true``, Triton) for logits of views.

    Views are sent as uint8 pixels in binary.

    Args:
        url: of the model; of a server alone, its model ``teacher``.
        settings: how it is asked.
    """

    batch = 16
    foreign: tuple[str, ...] = ("model", "key", "prompt")
    """Settings that are not of this protocol."""

    def __init__(self, url: str, settings: AskSettings) -> None:
        """Checks the url, without connecting; the arguments are the class's.

        Raises:
            UserError: a URL of another form, or a setting of the other protocol.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"from: must be http(s)://HOST:PORT/v2/models/NAME, got '{url}'")
        if parts.query or parts.fragment or "@" in parts.netloc:
            # what is left out may be a secret
            place = f"{parts.scheme}://{parts.hostname}{parts.path}"
            raise UserError(
                f"from: must have no user and no part after ? or #, got them with '{place}'"
            )
        for name in self.foreign:
            if getattr(settings, name) is not None:
                raise UserError(
                    f"from.{name}: has no effect on {url}: the address of a chat endpoint ends with {CHAT}"
                )
        path = parts.path.rstrip("/")
        if "/models/" not in path:
            path = f"{path.removesuffix('/v2')}/v2/models/teacher"
        self.path = path
        self.url = url
        self._parts = parts
        self.settings = settings
        self.output = settings.output or "logits"
        if settings.batch is not None:
            self.batch = settings.batch
        self.asked = 0
        """Pictures that were answered."""
        self.tries: list[int] = []
        """An entry for each sending of a request (:meth:`connect`'s included): how often that request was sent before."""
        self.seconds = 0.0
        """Spent in requests for answers."""
        self._idle: list[http.client.HTTPConnection] = []  # kept between requests
        self._next_time = 0.0
        self._classes = 0

    def connect(self, classes: Sequence[str]) -> dict[str, Any]:
        """Checks that the server answers in so many classes, and asks it for a fixed picture.

        Args:
            classes: names of the data's classes, by class id.

        Returns:
            What tells the model from any other one, whatever its address: its answer to the fixed picture.

        Raises:
            UserError: no such server, model or output, or another number of classes.
        """
        self._classes = len(classes)
        about = self._json("GET", self.path)
        outputs = {}
        for output in about.get("outputs") or []:
            name = output.get("name")
            outputs[name] = output.get("shape")
        if self.output not in outputs:
            names = ", ".join(map(str, outputs))
            raise UserError(f"from: {self.url} has no output '{self.output}' ({names})")
        shape = outputs[self.output]
        if not isinstance(shape, list) or shape[-1] not in (self._classes, -1):
            raise UserError(
                f"from: {self.url} answers in {shape}, the data has {self._classes} classes"
            )
        ramp = np.arange(3 * 64 * 64, dtype=np.uint32) % 251
        picture = ramp.astype(np.uint8).reshape(1, 64, 64, 3)
        answer = self._infer(picture, exact=False)
        digest = hashlib.sha256(answer.tobytes())
        probe = digest.hexdigest()[:16]
        _, _, name = self.path.rpartition("/")
        return {"arch": name, "answers_to_a_fixed_picture": probe}

    def logits_of(self, views: np.ndarray) -> np.ndarray:
        """Logits (or probabilities) float32 ``(N, C)`` of views uint8 ``(N, H, W, 3)``, at most :attr:`batch` of them.

        Waits first as long as ``from.rate`` demands; counts the pictures (:attr:`asked`) and the :attr:`seconds`.

        Raises:
            UserError: the server refuses or can't be reached, the budget is used up, or an answer that is not in the
                protocol or not finite.
        """
        budget = self.settings.budget
        if budget is not None and self.asked + len(views) > budget:
            raise UserError(
                f"from.budget: the budget of {budget:,} pictures is used up ({self.asked:,} asked); run the same "
                "command again with a larger one to resume, nothing is asked twice"
            )
        rate = self.settings.rate
        if rate is not None:
            now = time.monotonic()
            time.sleep(max(0.0, self._next_time - now))
            self._next_time = max(now, self._next_time) + len(views) / rate
        start = time.monotonic()
        logits = self._infer(views)
        self.seconds += time.monotonic() - start
        self.asked += len(views)
        return logits

    def spent(self) -> str:
        """What was asked, for people: pictures, requests, seconds, and the price where one is set."""
        repeated = sum(attempt > 0 for attempt in self.tries)
        text = (
            f"{self.asked:,} pictures asked in {len(self.tries):,} requests ({repeated:,} repeated), "
            f"{self.seconds:,.1f} s"
        )
        price = self.settings.price
        if price is not None:
            text += f", price {price * self.asked / 1000:g}"
        return text

    # -- the protocol ------------------------------------------------------------------------------------------------
    def _infer(self, views: np.ndarray, exact: bool = True) -> np.ndarray:
        """One request: views uint8 ``(N, H, W, 3)`` -> logits ``(N, C)``, float32.

        Args:
            views: of any equal size.
            exact: they are views of the training: ``kd-serve`` must not scale and crop them again. False: the fixed
                picture of :meth:`connect`.
        """
        parameters: dict[str, Any] = {"binary_data_size": views.nbytes}
        if exact:
            parameters["kd_views"] = True
        tensor = {
            "name": "pictures",
            "datatype": "UINT8",
            "shape": list(views.shape),
            "parameters": parameters,
        }
        wanted = {"name": self.output, "parameters": {"binary_data": True}}
        text = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        body, header = self._send("POST", f"{self.path}/infer", text + views.tobytes(), len(text))
        return self._logits(body, header, len(views))

    def _logits(self, body: bytes, header: str | None, count: int) -> np.ndarray:
        """The logits ``(count, C)``, float32, in a response: in binary after the JSON, or in it.

        Args:
            body: of the response, the JSON first.
            header: the JSON's length in bytes, as text; None: all of the body is JSON.
            count: pictures that were sent.

        Raises:
            UserError: another tensor, or NaN or infinity in it.
        """
        size = int(header) if header and header.isdecimal() else len(body)
        shape = (count, self._classes)
        try:
            outputs = json_of(body[:size])["outputs"]
            output = next(each for each in outputs if each["name"] == self.output)
            if "data" in output:
                numbers = np.array(output["data"], np.float32)
            else:
                numbers = np.frombuffer(body[size : size + 4 * count * self._classes], "<f4")
            logits = numbers.reshape(shape).astype(np.float32)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise UserError(
                f"from: {self.url} did not answer with {count} x {self._classes} numbers in '{self.output}'"
            ) from error
        if not np.isfinite(logits).all():
            raise UserError(f"from: {self.url} answers NaN or infinity")
        return logits

    def _json(self, method: str, path: str) -> dict[str, Any]:
        """The JSON object that the address returns for a path of KServe v2; anything else is a user's error."""
        body, _ = self._send(method, path, b"", 0)
        try:
            content = json_of(body)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"from: {self.url} does not speak KServe v2")
        return content

    def _send(
        self, method: str, path: str, body: bytes, json_bytes: int
    ) -> tuple[bytes, str | None]:
        """Sends a request, again after failures that may pass (no connection, :data:`AGAIN`), ``from.retries`` times.

        Between two tries it sleeps as long as the server's ``Retry-After`` says, else 0.5 s, then twice as long each
        time; at most :data:`LONGEST_WAIT_S`. The first failure is printed.

        Args:
            method: ``GET`` or ``POST``.
            path: of the URL.
            body: JSON, with tensors in binary after it; empty for ``GET``.
            json_bytes: length of the JSON; 0: the body has no binary part.

        Returns:
            The response's body, and the length of its JSON in bytes as text; None: all of it is JSON.

        Raises:
            UserError: the last try failed, or another status than 200 that no second try mends.
        """
        pause = 0.5
        for attempt in range(self.settings.retries + 1):
            self.tries.append(attempt)
            try:
                status, answer, headers = self._once(method, path, body, json_bytes)
            except (OSError, http.client.HTTPException) as error:
                status = 0
                answer = str(error).encode() or b"no connection"
                headers = {}
            if status == 200:
                return answer, headers.get(HEADER.lower())
            if status and status not in AGAIN:
                break
            if attempt < self.settings.retries:
                if attempt == 0:
                    why = status or answer[:200].decode("utf-8", "replace")
                    print(
                        f"cache: {self.url}: {why}; asked again, up to {self.settings.retries} times",
                        file=sys.stderr,
                    )
                wait = headers.get("retry-after", "")
                time.sleep(min(LONGEST_WAIT_S, float(wait) if wait.isdecimal() else pause))
                pause = min(LONGEST_WAIT_S, 2 * pause)
        reason = " ".join(answer[:200].decode("utf-8", "replace").split())
        raise UserError(
            f"from: {self.url} can't be asked: {status or 'no answer'}, {reason}; run the same command again to resume, "
            "nothing is asked twice"
        )

    def _headers(self, json_bytes: int) -> dict[str, str]:
        """Headers of a request whose body is ``json_bytes`` bytes of JSON, then binary tensors; 0: nothing is binary."""
        headers = {"Content-Type": "application/octet-stream"}
        if json_bytes:
            headers[HEADER] = str(json_bytes)
        return headers

    def _once(
        self, method: str, path: str, body: bytes, json_bytes: int
    ) -> tuple[int, bytes, dict[str, str]]:
        """Sends one request on a connection that is kept for the next one.

        A kept connection that the server has closed is replaced by another; any other failure is raised, without a second
        try.

        Returns:
            The HTTP status, the body (at most :data:`LARGEST_ANSWER` bytes) and the headers, their names in lower case.
        """
        while True:
            connection = self._idle_connection()
            is_kept = connection.sock is not None
            try:
                connection.request(method, path, body or None, self._headers(json_bytes))
                response = connection.getresponse()
                content = response.read(LARGEST_ANSWER)
            except BaseException as error:
                connection.close()
                if is_kept and isinstance(error, ConnectionError):
                    continue  # the server had closed an idle connection
                raise
            if not response.isclosed():  # the body is longer
                connection.close()
            self._idle.append(connection)
            return response.status, content, {k.lower(): v for k, v in response.getheaders()}

    def _idle_connection(self) -> http.client.HTTPConnection:
        """A connection that no thread uses; a new one, not yet open, where all are in use."""
        try:
            return self._idle.pop()
        except IndexError:
            kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
            if self._parts.scheme == "https":
                kind = http.client.HTTPSConnection
            return kind(
                self._parts.hostname or "", self._parts.port, timeout=self.settings.timeout_s
            )
