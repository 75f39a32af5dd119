"""uvicorn with a port that is reserved early, a drain, and an exit code."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import ConfigError
from hybridjax.serving.http.generation import Lifecycle

logger = logging.getLogger("hybridjax.http")

BACKLOG = 2048
KEEP_ALIVE = 75
SHUTDOWN_GRACE = 1
MAX_HEADER_BYTES = 64 * 1024


def reserve(host: str, port: int) -> socket.socket:
    """Binds without listening: nobody else gets the port, and connections are refused until then.

    Raises:
      ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host is {host!r}; it must be an address of this machine ({error})") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"port is {port}; it cannot be opened on {host}: {error.strerror}") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Opens the reserved port; raises ConfigError if another process did so in the meantime."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        sock.close()
        raise ConfigError(f"port is {port}; it cannot be opened on {host}: {error.strerror}") from None


class HttpServer(uvicorn.Server):
    """Serves until a signal, then drains; a second signal ends the process at once."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None] = lambda: None):
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=SHUTDOWN_GRACE,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._drain_timeout = config.drain_timeout
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._on_ready()

    def stop(self) -> None:
        """Drains and ends; from any thread or signal handler, once the server has started."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + sig)
        self._stopping = True
        if self._loop is None:
            self.should_exit = True
        else:
            logger.info("%s: no new requests", signal.Signals(sig).name)
            self.stop()

    def _start_drain(self) -> None:
        self._drain_task = self._drain_task or asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._lifecycle.drain(self._drain_timeout)
        self.should_exit = True
