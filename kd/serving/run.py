"""Runs the application until SIGTERM or Ctrl-C; requests that were taken are finished."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from kd.errors import UserError
from kd.serving.app import Server

GRACE_S = 5
"""On top of a request's time-out, for the last answers."""


class _Uvicorn(uvicorn.Server):
    """Ends with status 0 on SIGTERM: uvicorn's own would raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is in use, or no such address.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"port: {host}:{port} can't be used: {error.strerror or error}") from error
    except OverflowError as error:
        raise UserError(f"port: must be between 0 and 65535, got {port}") from error


def serve(server: Server, listening: socket.socket) -> None:
    """Blocks until it is told to stop."""
    config = uvicorn.Config(
        server.app(), log_level="warning", access_log=False, lifespan="on", server_header=False,
        timeout_graceful_shutdown=round(server.limits.timeout_s) + GRACE_S,
    )  # fmt: skip
    running = _Uvicorn(config)
    asyncio.run(running.serve(sockets=[listening]))
