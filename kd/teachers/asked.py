"""A teacher behind an address: asked once for each view of a picture, and never twice, whatever ends the run."""

import hashlib
import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from kd.data.batch import Batch
from kd.errors import NoMoreAnswers, UserError
from kd.losses.base import check_range
from kd.machine import cache_dir
from kd.storage.elsewhere import json_of
from kd.teachers.answer import ALL, Answer, Wanted

KEY = "model.teacher.answers"
HEADER = "Inference-Header-Content-Length"
"""The header of a body in which binary tensors follow the JSON: its value is the JSON's length in bytes."""
DIGEST = 32
"""Bytes of SHA-256."""
CHECK = 4
"""Bytes of a record's checksum."""
LARGEST_ANSWER = 2**30
"""Bytes of a response that are read."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which the same request is sent again."""
LONGEST_WAIT_S = 30.0
"""Seconds between two tries of a request."""


class AnswerJournal:
    """Logits by the content of a view, in one file that only grows.

    A record is the digest of a view (:func:`_digest_of`), C numbers in float32, and the first four bytes of the SHA-256
    of both. A damaged record is overwritten, and what follows it is lost. Several processes may add to the file.

    Args:
        file: made if it is missing.
        classes: C.
    """

    def __init__(self, file: Path, classes: int) -> None:
        """Opens the journal, which is made where it is missing, and reads it under its lock; ``classes``: C."""
        self.file = file
        self.classes = classes
        self._size = DIGEST + 4 * classes + CHECK
        self._known: dict[bytes, np.ndarray] = {}
        self._read_bytes = 0
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{file}.lock")
        with self._lock:
            self._read_new()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, digest: bytes) -> np.ndarray | None:
        """The logits ``(C,)``, float32, of a view by its digest; None where no answer to it has been read."""
        return self._known.get(digest)

    def refresh(self) -> None:
        """Reads what other processes have added."""
        with self._lock:
            self._read_new()

    def add(self, digests: list[bytes], logits: np.ndarray) -> None:
        """Appends answers and forces them to the disk, before they are used.

        Args:
            digests: N, of the views; they are how answers are found again.
            logits: float32 ``(N, C)``.
        """
        parts = []
        for digest, row in zip(digests, logits, strict=True):
            content = digest + row.astype("<f4").tobytes()
            parts.append(content + hashlib.sha256(content).digest()[:CHECK])
        with self._lock:
            self._read_new()
            with self.file.open("r+b") as file:
                file.seek(self._read_bytes)  # over a record that was cut off
                file.write(b"".join(parts))
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            self._read_new()

    def _read_new(self) -> None:
        """Reads whole records from where the last reading ended; a damaged one ends it: :meth:`add` writes there.

        The caller holds the lock.
        """
        self.file.touch()
        with self.file.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        whole_records = len(content) // self._size
        for number in range(whole_records):
            start = number * self._size
            record = content[start : start + self._size]
            body, check = record[:-CHECK], record[-CHECK:]
            digest, answer = body[:DIGEST], body[DIGEST:]
            if hashlib.sha256(body).digest()[:CHECK] != check:
                break
            logits = np.frombuffer(answer, "<f4")
            self._known[digest] = logits.astype(np.float32)
            self._read_bytes += self._size


class Address:
    """Asks a server of the KServe v2 protocol (``kd-serve RUN teacher=true``, Triton) for logits of views.

    Used as ``model.teacher.answers=http://HOST:PORT/v2/models/NAME``. The answer to each view is kept by the view's
    content in a file, in float32: a later epoch, a resumed run and another run with the same views do not ask again.
    Views are sent as uint8 pixels in binary. Each process of a run sends its own requests.

    Args:
        url: of the model; of a server alone, its model ``teacher``.
        rate: pictures a second of this process at most; default: as fast as it answers.
        budget: pictures that this process may ask for; the run then ends. A process that resumes it counts from 0.
        price: of 1,000 pictures, in any currency; for the run's page.
        retries: how often a request is sent again after failures, with pauses that double up to 30 s.
        timeout_s: of each try: seconds to connect, and to wait for data.
        batch: most pictures of a request.
        output: name of the tensor with the logits (or probabilities).
        folder: of the answers; default: one in the user's cache folder.
    """

    elsewhere = "address"

    def __init__(
        self,
        url: str,
        rate: float | None = None,
        budget: int | None = None,
        price: float | None = None,
        retries: int = 8,
        timeout_s: float = 60.0,
        batch: int = 16,
        output: str = "logits",
        folder: str | None = None,
    ) -> None:
        """Checks the settings and the url, without connecting; the arguments are the class's.

        Raises:
            ValueError: one is out of its range; the message names it.
        """
        check_range("rate", rate, "> 0")
        check_range("budget", budget, "> 0")
        check_range("price", price, ">= 0")
        check_range("retries", retries, ">= 0")
        check_range("timeout_s", timeout_s, "> 0")
        check_range("batch", batch, ">= 1")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http(s)://HOST:PORT/v2/models/NAME, got '{url}'")
        if parts.query or parts.fragment or "@" in parts.netloc:
            place = (
                f"{parts.scheme}://{parts.hostname}{parts.path}"  # what is left out may be a secret
            )
            raise ValueError(
                f"url must have no user and no part after ? or #, got them with '{place}'"
            )
        path = parts.path.rstrip("/")
        if "/models/" in path:
            self.path = path
        else:
            self.path = f"{path.removesuffix('/v2')}/v2/models/teacher"
        self.url = url
        self._parts = parts
        self.rate = rate
        self.budget = budget
        self.price = price
        self.retries = retries
        self.timeout_s = timeout_s
        self.batch = batch
        self.output = output
        if folder:
            self._folder = Path(folder)
        else:
            self._folder = cache_dir() / "answers"
        self.asked = 0
        self.on_asked: Callable[[], None] | None = None
        """Called after each request that was answered, before its answers are used."""
        self._idle: list[http.client.HTTPConnection] = []  # kept between requests
        self._tries: list[int] = []  # of each request, how often it was sent before
        self.seconds = 0.0
        self._next_time = 0.0
        self._journal: AnswerJournal | None = None
        self._probe = ""

    # -- what a teacher is -------------------------------------------------------------------------------------------
    def build(self, num_classes: int, img_size: object = None) -> "Address":
        """Checks that the server answers in so many classes, asks it for a fixed picture, and opens the answers that were
        kept of the model that answers so.

        Args:
            num_classes: C of the data.
            img_size: not read: views are sent as they are.

        Raises:
            UserError: no such server, model or output, or another number of classes.
        """
        about = self._json("GET", self.path)
        outputs = {}
        for output in about.get("outputs") or []:
            outputs[output.get("name")] = output.get("shape")
        if self.output not in outputs:
            names = ", ".join(map(str, outputs))
            raise UserError(
                f"model.teacher.answers: {self.url} has no output '{self.output}' ({names})"
            )
        shape = outputs[self.output]
        if not isinstance(shape, list) or shape[-1] not in (num_classes, -1):
            raise UserError(
                f"model.teacher.answers: {self.url} answers in {shape}, the data has {num_classes} classes"
            )
        # The answer to a fixed picture tells a model from another one at the same address.
        ramp = np.arange(3 * 64 * 64, dtype=np.uint32) % 251
        picture = ramp.astype(np.uint8).reshape(1, 64, 64, 3)
        answer = self._infer(picture, num_classes, exact=False)
        self._probe = hashlib.sha256(answer.tobytes()).hexdigest()[:16]
        file = self._folder / f"{self._probe}-{num_classes}.bin"
        self._journal = AnswerJournal(file, num_classes)
        return self

    def identity(self) -> dict[str, Any]:
        """What the server answers to a fixed picture: the same model elsewhere has the same identity."""
        return {"answers_to_a_fixed_picture": self._probe}

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The logits of the batch's views, float32 ``(N, C)``, on their device; only unknown views are asked for.

        Args:
            batch: its pictures are uint8 ``(N, 3, H, W)``.
            wanted: not read.

        Raises:
            NoMoreAnswers: the server refuses or can't be reached, or the budget is used up.
            UserError: pictures of another type, or an answer that is not in the protocol or not finite.
        """
        images = batch["image"]
        views_NHW3 = images.permute(0, 2, 3, 1).cpu().numpy()
        views = np.ascontiguousarray(views_NHW3)
        if views.dtype != np.uint8:
            raise UserError("model.teacher.answers: takes uint8 pictures, of kd's own loaders")
        logits = torch.from_numpy(self.logits_of(views))
        return Answer({ALL: logits.to(images.device)})

    def logits_of(self, views: np.ndarray) -> np.ndarray:
        """Logits float32 ``(N, C)`` of views uint8 ``(N, H, W, 3)``: from the journal, else from the address.

        Equal views are sent once; each answered part (of :attr:`batch` views at most) is in the journal before the next
        is sent. Raises as :meth:`answer`.
        """
        journal = self._journal
        assert journal is not None, "build() comes first"
        digests = [_digest_of(view) for view in views]
        if any(journal.get(digest) is None for digest in digests):
            journal.refresh()  # another process may have written it
        view_of: dict[bytes, np.ndarray] = {}  # equal views are asked for once
        for digest, view in zip(digests, views, strict=True):
            if journal.get(digest) is None:
                view_of.setdefault(digest, view)

        missing = list(view_of)
        for start in range(0, len(missing), self.batch):
            part = missing[start : start + self.batch]
            self._check_budget(len(part))
            part_views = np.stack([view_of[digest] for digest in part])
            answers = self._infer(part_views, journal.classes)
            self.asked += len(part)
            journal.add(part, answers)
            if self.on_asked is not None:
                self.on_asked()
        rows = [journal.get(digest) for digest in digests]
        return np.stack([row for row in rows if row is not None])

    def _check_budget(self, count: int) -> None:
        """Raises :class:`~kd.errors.NoMoreAnswers` where ``count`` more pictures would exceed the budget."""
        if self.budget is not None and self.asked + count > self.budget:
            raise NoMoreAnswers(
                f"model.teacher.answers: the budget of {self.budget:,} pictures is used up ({self.asked:,} asked); "
                "give a larger model.teacher.builder.budget"
            )

    def report(self) -> dict[str, Any]:
        """Counts of this process for the run's page; ``asked.json`` and ``summary.json`` hold them.

        Returns:
            ``asked``: pictures; ``requests``: all tries, the check of the server among them; ``repeated``: tries after
            a failed one; ``seconds`` spent in requests for answers; ``kept``: answers in the journal, of other runs
            too; ``price`` of the pictures asked, where it is set.
        """
        counts = {
            "url": self.url,
            "asked": self.asked,
            "requests": len(self._tries),
            "repeated": sum(attempt > 0 for attempt in self._tries),
            "seconds": round(self.seconds, 1),
            "kept": 0 if self._journal is None else len(self._journal),
        }
        if self.price is not None:
            counts["price"] = round(self.price * self.asked / 1000, 4)
        return counts

    # -- the protocol ------------------------------------------------------------------------------------------------
    def _infer(self, views: np.ndarray, classes: int, exact: bool = True) -> np.ndarray:
        """One request: views uint8 ``(N, H, W, 3)`` -> logits ``(N, C)``, float32.

        Args:
            views: of any equal size.
            classes: C.
            exact: they are views of the training: ``kd-serve`` must not scale and crop them again. False: the fixed
                picture of :meth:`build`.
        """
        shape = list(views.shape)
        tensor = {
            "name": "pictures",
            "datatype": "UINT8",
            "shape": shape,
            "parameters": {
                "binary_data_size": views.nbytes,
                **({"kd_views": True} if exact else {}),
            },
        }
        wanted = {"name": self.output, "parameters": {"binary_data": True}}
        text = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        self._keep_rate(len(views))
        start = time.monotonic()
        body, header = self._send("POST", f"{self.path}/infer", text + views.tobytes(), len(text))
        self.seconds += time.monotonic() - start
        return self._logits(body, header, len(views), classes)

    def _logits(self, body: bytes, header: str | None, count: int, classes: int) -> np.ndarray:
        """The logits ``(count, classes)``, float32, in a response: in binary after the JSON, or in it.

        Args:
            body: of the response, the JSON first.
            header: the JSON's length in bytes, as text; None: all of the body is JSON.
            count: pictures that were sent.
            classes: C of the data.

        Raises:
            UserError: another tensor, or NaN or infinity in it.
        """
        if header and header.isdecimal():
            size = int(header)
        else:
            size = len(body)
        try:
            outputs = json_of(body[:size])["outputs"]
            output = next(each for each in outputs if each["name"] == self.output)
            if "data" in output:
                numbers = np.array(output["data"], np.float32)
            else:
                numbers = np.frombuffer(body[size : size + 4 * count * classes], "<f4")
            logits = numbers.reshape(count, classes).astype(np.float32)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise UserError(
                f"model.teacher.answers: {self.url} did not answer with {count} x {classes} numbers in '{self.output}'"
            ) from error
        if not np.isfinite(logits).all():
            raise UserError(f"model.teacher.answers: {self.url} answers NaN or infinity")
        return logits

    def _json(self, method: str, path: str) -> dict[str, Any]:
        """The JSON object that the address returns for a path of KServe v2; anything else is a user's error."""
        body, _ = self._send(method, path, b"", 0)
        try:
            content = json_of(body)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"model.teacher.answers: {self.url} does not speak KServe v2")
        return content

    def _keep_rate(self, pictures: int) -> None:
        """Sleeps until ``pictures`` more may be sent at ``rate`` pictures a second (None: does not sleep)."""
        if self.rate is None:
            return
        now = time.monotonic()
        time.sleep(max(0.0, self._next_time - now))
        self._next_time = max(now, self._next_time) + pictures / self.rate

    def _send(
        self, method: str, path: str, body: bytes, json_bytes: int
    ) -> tuple[bytes, str | None]:
        """Sends a request, again after failures that may pass (no connection, :data:`AGAIN`), ``retries`` times.

        Between two tries it sleeps as long as the server's ``Retry-After`` says, else 0.5 s, then twice as long each
        time; at most :data:`LONGEST_WAIT_S`.

        Args:
            method: ``GET`` or ``POST``.
            path: of the URL.
            body: JSON, with tensors in binary after it; empty for ``GET``.
            json_bytes: length of the JSON; 0: the body has no binary part.

        Returns:
            The response's body, and the length of its JSON in bytes as text; None: all of it is JSON.

        Raises:
            NoMoreAnswers: the last try failed, or another status than 200 that no second try mends.
        """
        pause = 0.5
        for attempt in range(self.retries + 1):
            self._tries.append(attempt)
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
            if attempt < self.retries:
                wait = headers.get("retry-after", "")
                time.sleep(min(LONGEST_WAIT_S, float(wait) if wait.isdecimal() else pause))
                pause = min(LONGEST_WAIT_S, 2 * pause)
        reason = " ".join(answer[:200].decode("utf-8", "replace").split())
        raise NoMoreAnswers(
            f"model.teacher.answers: {self.url} can't be asked: {status or 'no answer'}, {reason}"
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
        """Sends one request on a connection that is kept for the next, without a second try.

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
            return kind(self._parts.hostname or "", self._parts.port, timeout=self.timeout_s)


def _digest_of(view: np.ndarray) -> bytes:
    """What tells a view's content, and its shape, from any other's."""
    shape = str(view.shape).encode()
    return hashlib.sha256(shape + view.tobytes()).digest()
