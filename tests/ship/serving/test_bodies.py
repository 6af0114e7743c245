"""Bodies of requests: what they hold, and how much of it at a time."""

import asyncio
import base64
import json

import pytest

pytest.importorskip("starlette")
from starlette.requests import Request

from kd.ship.serving.bodies import Busy, Room, Share, read_uploads
from kd.ship.serving.limits import Limits


def test_a_share_is_given_back_and_large_requests_are_refused_first() -> None:
    room = Room(10)
    with Share(room) as first:
        first.take(4)
        with pytest.raises(Busy):
            first.take(4)  # would hold 8 and needs room for as much again
        with Share(room) as second:
            second.take(3)
            assert room.held == 7
        assert room.held == 4
    assert room.held == 0


def uploads(body: bytes, kind: str) -> list[tuple[str, bytes]]:
    async def read() -> list[tuple[str, bytes]]:
        parts = [body[i : i + 50_000] for i in range(0, len(body), 50_000)] or [b""]

        async def receive() -> dict[str, object]:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def here(function, *args):  # type: ignore[no-untyped-def]
            return function(*args)

        scope = {
            "type": "http",
            "headers": [(b"content-type", kind.encode())],
            "method": "POST",
            "path": "/",
        }
        with Share(Room(1e9)) as share:
            return await read_uploads(Request(scope, receive), Limits(), share, here)  # type: ignore[arg-type]

    return asyncio.run(read())


def test_pictures_of_json_and_of_forms() -> None:
    text = base64.b64encode(b"picture").decode()
    assert uploads(json.dumps({"images": [text]}).encode(), "application/json") == [
        ("picture 0", b"picture")
    ]
    many = json.dumps({"images": [f"data:image/png;base64,{text}"] * 2}).encode()
    assert [content for _, content in uploads(many, "application/json")] == [b"picture"] * 2
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\npicture\r\n--x--\r\n'
    assert uploads(form, "multipart/form-data; boundary=x") == [("a.jpg", b"picture")]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n  ", " \t"], ids=repr)
@pytest.mark.parametrize("prefix", ["", "data:image/jpeg;base64,"])
def test_base64_may_have_line_breaks(line_end: str, prefix: str) -> None:
    """As ``base64.encodebytes``, ``openssl base64`` and mail write it, 76 characters a line (RFC 2045)."""
    picture = bytes(range(256))
    lines = base64.encodebytes(picture).decode().splitlines()
    body = json.dumps({"images": [prefix + line_end.join(lines) + line_end]}).encode()
    assert uploads(body, "application/json") == [("picture 0", picture)]
