"""Which hosts and pages a server answers."""

import asyncio

import pytest

pytest.importorskip("starlette")
from kd.ship.serving.hosts import KnownHosts


async def status_of(host: str, origin: str | None = None, names: tuple[str, ...] = ()) -> int:
    sent: list[dict[str, object]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        sent.append({"status": 200})

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    scope = {"type": "http", "headers": headers, "method": "GET", "path": "/"}
    await KnownHosts(app, names)(scope, None, send)  # type: ignore[arg-type]
    return int(str(sent[0]["status"]))


@pytest.mark.parametrize(("host", "origin", "names", "status"), [
    ("localhost:8000", None, (), 200), ("127.0.0.1:8000", None, (), 200), ("[::1]:8000", None, (), 200),
    ("evil.example", None, (), 403), ("pictures.example", None, ("pictures.example",), 200),
    ("localhost:8000", "http://localhost:8000", (), 200), ("localhost:8000", "http://evil.example", (), 403),
    ("user@localhost", None, (), 403), ("", None, (), 403),
])  # fmt: skip
def test_known_hosts_pass(
    host: str, origin: str | None, names: tuple[str, ...], status: int
) -> None:
    assert asyncio.run(status_of(host, origin, names)) == status
