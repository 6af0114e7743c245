"""The pictures of a request's body: a form's files, JSON with base64, or one picture; bounded while they arrive."""

import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from kd.ship.serving.limits import Limits
from kd.storage.elsewhere import json_of

DROPPED = 8  # A body of so many times the limit is cut off
MARKS = 10_000
"""More brackets, commas and colons of JSON than any list of pictures has: parsed, they would take much memory."""
Upload = tuple[str, bytes]  # A picture's name and its encoded bytes
Elsewhere = Callable[..., Awaitable[list[Upload]]]


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of the answer.
        reason: in words.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Busy(Exception):
    """Too much waits already."""


class Room:
    """What all requests together may hold at a time, in bytes or pictures; each takes its :class:`Share` of it.

    Args:
        most: of all requests together.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.held = 0.0


class Share:
    """What one request holds of a :class:`Room`; a context manager that gives it back at its end."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._mine = 0.0

    def take(self, amount: float) -> None:
        """Takes ``amount`` more of the room.

        The room must have ``amount`` free, and beyond that as much as this request holds already: so where room is short, a
        request that holds much is refused before one that holds little.

        Args:
            amount: in the room's unit.

        Raises:
            Busy: the room is too full; nothing is taken. What the request holds is given back at its end.
        """
        if self._room.held + self._mine + amount > self._room.most:
            raise Busy
        self._room.held += amount
        self._mine += amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.held -= self._mine


async def read_uploads(
    request: Request, limits: Limits, share: Share, parse: Elsewhere
) -> list[Upload]:
    """The pictures of a request; never more bytes in memory than the limit allows.

    Args:
        request: multipart with files, JSON with base64 ``images``, or one picture as ``image/*``.
        limits: of the server.
        share: what the request holds of the server's memory.
        parse: runs a function on another thread, for the JSON.

    Returns:
        Name and bytes of each picture, in order.

    Raises:
        Refused: another content type (415), no pictures or a body that can't be read (400), too many or too large (413).
            Whether each is a picture shows when it is decoded.
        Busy: the server has no room for the body now.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads = await _multipart(request, limits, share)
    elif kind == "application/json":
        body = await read_body(request, limits, share)
        uploads = await parse(_from_json, body, limits.max_pictures)
    elif kind.startswith("image/") or kind == "application/x-image":
        body = await read_body(request, limits, share)
        uploads = [("picture 0", bytes(body))]
    else:
        raise Refused(
            415,
            "send multipart/form-data with files, application/json with base64 'images', or image/*",
        )
    if not uploads:
        raise Refused(400, "no pictures in the request")
    check_count(len(uploads), limits.max_pictures)
    return uploads


def check_count(count: int, most: int) -> None:
    """Refuses more pictures than a request may have.

    Raises:
        Refused: 413.
    """
    if count > most:
        raise Refused(413, f"{count} pictures are more than {most} a request")


async def read_body(request: Request, limits: Limits, share: Share) -> bytearray:
    """The whole body, counted while it arrives.

    Raises:
        Refused: 413, larger than ``limits``.
        Busy: the server has no room for it now.
    """
    body = bytearray()
    async for part in _bounded(request, limits, share):
        body += part
    return body


async def _bounded(request: Request, limits: Limits, share: Share) -> AsyncIterator[bytes]:
    """The body's parts, as they arrive, their bytes taken from ``share``.

    What is over ``limits.max_upload_mb`` is read and dropped, so that the refusal comes after the body: few clients read an
    answer before they have sent everything.

    Raises:
        Refused: larger than the limit (at the end of the body, or at :data:`DROPPED` times the limit).
        Busy: the server has no room for a part now.
    """
    most = limits.max_upload_mb * 1e6
    seen = 0
    async for part in request.stream():
        seen += len(part)
        if seen > DROPPED * most:
            break
        if seen <= most:
            share.take(len(part))
            yield part
    if seen > most:
        raise Refused(413, f"the request is larger than {limits.max_upload_mb:g} MB")


async def _multipart(request: Request, limits: Limits, share: Share) -> list[Upload]:
    """The files of a form, each with its name (``picture N``, from 0, where it has none); other fields are left out.

    Read in memory within the limits.

    Raises:
        Refused: the form can't be read (400), or is too large (413).
        Busy: the server has no room for a part now.
    """
    parser = MultiPartParser(
        request.headers,
        _bounded(request, limits, share),  # type: ignore[arg-type]
        max_files=limits.max_pictures + 1,  # one too many is left to check_count, which says why
        max_fields=100,
    )
    # in memory: a process has few files
    parser.spool_max_size = int(limits.max_upload_mb * 1e6) + 1
    try:
        form = await parser.parse()
    except (
        MultiPartException,
        KeyError,
        ValueError,
    ) as error:  # a charset may raise any ValueError
        raise Refused(400, f"the form can't be read: {getattr(error, 'message', error)}") from error
    try:
        uploads: list[Upload] = []
        for _, value in form.multi_items():
            if isinstance(value, UploadFile):
                name = (value.filename or "").encode("utf-8", "replace").decode()  # lone surrogates
                uploads.append((name or f"picture {len(uploads)}", await value.read()))
        return uploads
    finally:
        await form.close()


def count_marks(text: bytearray) -> int:
    """How many opening brackets, commas and colons a JSON text has: it has at most one value more."""
    return sum(text.count(mark) for mark in (b"[", b"{", b",", b":"))


def _from_json(body: bytearray, most: int) -> list[Upload]:
    """The pictures of a JSON body, decoded from base64 and named by number.

    Args:
        body: ``{"images": ["BASE64", ...]}``.
        most: pictures that a request may have.

    Raises:
        Refused: other JSON or none (400), or too many pictures (413).
    """
    try:
        if count_marks(body) > MARKS:
            raise ValueError
        pictures = json_of(body)["images"]
        if not isinstance(pictures, list):
            raise TypeError
        if not all(isinstance(picture, str) for picture in pictures):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(400, 'the JSON must be {"images": ["BASE64", ...]}') from error
    check_count(len(pictures), most)
    return [(f"picture {i}", from_base64(i, text)) for i, text in enumerate(pictures)]


def from_base64(i: int, text: str) -> bytes:
    """Bytes of picture ``i`` from base64, also as a ``data:`` URL.

    Raises:
        Refused: 400, not base64.
    """
    if text.startswith("data:"):
        text = text.partition(",")[2]
    in_one_line = "".join(text.split())  # encoders break lines (RFC 2045)
    try:
        return base64.b64decode(in_one_line, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(400, f"picture {i} is not base64") from error
