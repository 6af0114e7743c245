"""Runs the application until SIGTERM or Ctrl-C; requests that were taken are finished.

Uvicorn's own connections (``limit_concurrency``, ``timeout_keep_alive``) were tried in the place of these: half-sent headers
and pipelined requests held other clients up, open connections got no answer at the end, and SIGTERM was its exit status.
"""

import asyncio
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kd.errors import UserError
from kd.ship.serving.app import Server
from kd.ship.serving.limits import Limits

GRACE_S = 5  # On top of a request's time-out, for the last answers
HEADERS_S = 10.0  # A client has so long for a request's headers
DRAIN_S = 1.0  # Open connections are answered for so long after SIGTERM, then closed
WAITING = 2048  # Connections that the system keeps until they are accepted
LINGER_S = 2.0  # A connection that is ended is read for so long: else its answer could be lost
LINGERING = 3  # One connection that is read so, for as many that are open
PIPELINED = 4
"""Requests that a connection may send before it has read the answers; then it is closed. Else one client with many
connections would queue thousands of requests before the next client's picture."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Lingering:
    """A transport whose ``close`` calls ``end`` instead, so that unread bytes are read first.

    Args:
        transport: of asyncio, which all other calls go to.
        end: :meth:`_Connection._end`, which sets :attr:`ended`.
    """

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport = transport
        self.close = end
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.ended or self._transport.is_closing()


class _Connection(H11Protocol):
    """uvicorn's connection with a limit on each stage: seconds for headers, the time-out for a request and its answer.

    Above ``most`` connections a new one replaces the one that has sent no whole request for longest (503). After the
    answer, what the client still sends is read for a while: closing a socket with unread bytes would lose the answer.
    """

    most: int  # open connections; a third as many closing ones are still read
    _due: asyncio.TimerHandle
    _socket: asyncio.Transport
    _ended = False
    _pipelined = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: begins its time for a request's headers, and closes idle ones where there are too many."""
        self._socket = transport
        super().connection_made(cast(asyncio.Transport, _Lingering(transport, self._end)))
        self._watch()
        self._make_room()

    def _make_room(self) -> None:
        """Above ``most`` open connections, ends idle ones, the longest idle first, then this one. Above a third as many that
        are ended and still read (:meth:`_end`), cuts off those read for longest.
        """
        if len(self.connections) <= self.most:
            return
        connections = cast("set[_Connection]", self.connections)
        ended = []
        idle = []
        open_count = 0
        for connection in sorted(connections, key=lambda c: c._due.when()):
            socket_ = connection._socket
            if socket_.is_closing() and not socket_.get_write_buffer_size():
                continue  # its own end comes with the loop's next turn, as it has nothing left to send
            if connection.transport.is_closing():
                ended.append(connection)
                continue
            open_count += 1
            if connection.idle and connection is not self:
                idle.append(connection)
        too_many = max(0, open_count - self.most)
        for least in [*idle, self][:too_many]:
            if least.cycle is None:
                least._socket.write(FULL)
            least._end()
        too_many_ended = max(0, len(ended) - self.most // LINGERING)
        for unread in ended[:too_many_ended]:
            unread._socket.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side: its timer ends with it; Uvicorn calls it."""
        self._due.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; of a connection that is ended they are dropped."""
        if not self._ended:
            super().data_received(data)

    def on_response_complete(self) -> None:
        """A request is answered: the time for the next begins; a client that sends many ahead is closed."""
        if not self._ended:
            self._due.cancel()
            self._watch()
            next_request, _ = self.conn.trailing_data
            if next_request:
                self._pipelined = self._pipelined + 1
            else:
                self._pipelined = 0
            if self._pipelined > PIPELINED:
                self._end()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Begins the time of a stage: until a request's headers are whole, or until its answer is sent."""
        allowed = HEADERS_S
        if not self.idle:
            allowed = cast(float, self.config.timeout_graceful_shutdown)
        self._due = self.loop.call_later(allowed, self._late, self.cycle, self.idle)

    def _late(self, cycle: object, idle: bool) -> None:
        """The time of :meth:`_watch` is over: cuts off a connection that is still at the same request and stage; another
        gets new time.

        Args:
            cycle: Uvicorn's object of the request when the time began; None before the first.
            idle: whether it was answered, or not whole, then.
        """
        if self.cycle is cycle and self.idle == idle:
            self._socket.abort()
        else:
            self._watch()

    def _end(self) -> None:
        """Ends the connection: sends what is written so far, then reads and drops until the client closes too.

        It is cut off after :data:`LINGER_S` seconds, or after the grace of the shutdown where something is unsent. A second
        call does nothing.
        """
        if self.transport.is_closing():
            return
        self._ended = cast(_Lingering, self.transport).ended = True
        self._due.cancel()
        unsent = self._socket.get_write_buffer_size()
        allowed = LINGER_S
        if unsent:
            allowed = cast(float, self.config.timeout_graceful_shutdown)
        self._due = self.loop.call_later(allowed, self._socket.abort)
        self._socket.resume_reading()
        try:
            self._socket.write_eof()
        except OSError:  # the client has gone
            self._socket.abort()


class _Uvicorn(uvicorn.Server):
    """Answers open requests on SIGTERM and ends with status 0; uvicorn's server would raise the signal again.

    Args:
        config: of Uvicorn.
        server: the application, which is not ready from SIGTERM on.
    """

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._last_line = -60.0  # seconds of the monotonic clock

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and Ctrl-C end the server by the event loop; Uvicorn calls it."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles the loop's errors. While too many files are open, accepting a connection fails all the time: one line a
        minute is printed. Other errors go to the loop's own handler.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() > self._last_line + 60:
            self._last_line = time.monotonic()
            line = f"kd-serve: new connections must wait: {error.strerror}"
            print(line, file=sys.stderr, flush=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the server, then lets each socket queue :data:`WAITING` connections; Uvicorn calls it."""
        await super().startup(sockets)
        # after asyncio's own listen, whose backlog is how many it accepts at a time
        for listening in sockets or []:
            listening.listen(WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections; each answer from now on closes its own. Waits up to :data:`DRAIN_S` seconds until no
        connection is open, then shuts down as Uvicorn does, which finishes the requests that were taken. Uvicorn calls it.
        """
        self._server.ready = False
        for server in self.servers:
            server.close()
        headers = [*self.server_state.default_headers, (b"connection", b"close")]
        self.server_state.default_headers = headers
        for connection in cast("set[_Connection]", self.server_state.connections):
            if not connection.idle:
                connection.cycle.default_headers = headers
        end = time.monotonic() + DRAIN_S
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Args:
        host: address of the machine to listen at; with a colon it is IPv6.
        port: 0: the system chooses a free one.

    Raises:
        UserError: the port is in use, or no such address.
    """
    try:
        if ":" in host:
            family = socket.AF_INET6
        else:
            family = socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"port: {host}:{port} can't be used: {error.strerror or error}") from error
    # Accepted sockets inherit it: an answer's body is sent without waiting for the acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def serve(server: Server, listening: socket.socket) -> None:
    """Serves on a bound socket until SIGTERM or Ctrl-C; requests that were taken are answered before it returns.

    Args:
        server: the application.
        listening: see :func:`bind`.
    """
    most, at_once = connections(server.limits)
    config = uvicorn.Config(
        server.app(),
        http=type("_Bounded", (_Connection,), {"most": most}),
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="on",
        server_header=False,
        backlog=at_once,
        timeout_graceful_shutdown=round(server.limits.timeout_s) + GRACE_S,
    )
    asyncio.run(_Uvicorn(config, server).serve(sockets=[listening]))


def connections(limits: Limits) -> tuple[int, int]:
    """How many connections may be open, and how many are accepted at a time.

    Every connection is a file of the process. Of the files that it may have, 3/8 are for open connections, 1/8 (a third of
    that, :data:`LINGERING`) for those that are closing, the other half for all else. However many files there are, no
    more connections are open than 1024, or twice ``limits.queue`` where that is more.

    Returns:
        The most open ones, and the most accepted at once: 1/16 of the files, at least 1 and at most 128.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 0:  # no limit
        files = 1 << 20
    most_open = min(3 * files // 8, max(1024, 2 * limits.queue))
    accepted_at_once = max(1, min(128, files // 16))
    return most_open, accepted_at_once
