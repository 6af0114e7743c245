"""An OTLP collector of the tests' own."""

from collections.abc import Iterator

import pytest

from tests._http import Handler, http_server


class Receiver(Handler):
    """An OTLP collector: keeps what is posted."""

    bodies: list[bytes] = []  # noqa: RUF012 (the test reads it)
    paths: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        Receiver.paths.append(self.path)
        Receiver.bodies.append(self.posted())
        self.reply(200, Content_Type="application/x-protobuf")


@pytest.fixture()
def collector() -> Iterator[str]:
    with http_server(Receiver) as server:
        yield server.address
