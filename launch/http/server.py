"""Runs the application: one socket, one event loop, and an end that lets streams end.

On the first SIGTERM or SIGINT the server stops accepting, running requests get `shutdown_timeout_s` to finish, the rest
is cancelled and its streams end as streams do. A second SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from launch.http.app import create_app
from launch.http.state import ServerState

# After streams were cancelled, a client that does not read may hold its connection this long.
_CLOSING_S = 2.0
_POLL_S = 0.02


class AddressError(Exception):
    """The server cannot listen where it should; the message says what to change."""


def open_socket(host: str, port: int) -> socket.socket:
    """Binds the address, before anything slow is done.

    Raises:
        AddressError: in one line, what is wrong and what to do.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise AddressError(f"--host {host!r} is not an address of this machine: {error.strerror}") from error
    opened = socket.socket(family, kind, proto)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Listening starts with the server: a client that comes earlier is refused, not kept waiting.
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise _address_error(host, port, error) from error
    return opened


def _address_error(host: str, port: int, error: OSError) -> AddressError:
    advice = "stop what listens there, or choose another --port (0 for a free one)"
    return AddressError(f"cannot listen on {host} port {port} ({error.strerror}): {advice}")


def serve_app(state: ServerState, listening: socket.socket, *, on_started: Callable[[], None] | None = None) -> bool:
    """Serves until a signal or `Server.should_exit`; the engine is left to the caller.

    Args:
        state: what the routes share.
        listening: from `open_socket`; closed at the end.
        on_started: called when requests are answered.

    Returns:
        False where a second SIGINT ended it at once.

    Raises:
        AddressError: another program began to listen there since the socket was opened.
    """
    server = Server(state, on_started=on_started)
    server.run(sockets=[listening])
    return not server.force_exit


class Server(uvicorn.Server):
    """uvicorn's server with our end: streams finish or are cancelled cleanly, and the exit code is the caller's."""

    def __init__(self, state: ServerState, *, on_started: Callable[[], None] | None = None) -> None:
        log_level = "info" if state.config.access_log else "warning"
        limit_s = state.config.shutdown_timeout_s + _CLOSING_S
        super().__init__(
            uvicorn.Config(
                create_app(state),
                log_level=log_level,
                access_log=state.config.access_log,
                lifespan="off",
                server_header=False,
                # uvicorn takes whole seconds.
                timeout_graceful_shutdown=int(limit_s + 1),
            )
        )
        self._state, self._on_started = state, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            config = self._state.config
            raise _address_error(config.host, config.port, error) from error
        if self._on_started is not None:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        ending = asyncio.ensure_future(self._end_flights())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            ending.cancel()

    async def _end_flights(self) -> None:
        """Gives the flights their time, then cancels them: each gets a last piece and its stream ends."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._state.config.shutdown_timeout_s
        while self._state.flights and clock() < until_s and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        for flight in list(self._state.flights):
            flight.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that ended the server well is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            # What is cut off now would be reported as failed.
            logging.getLogger("uvicorn.error").disabled = True
        self.should_exit = True
