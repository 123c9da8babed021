"""The app in a real server on a free port, for clients outside this process or thread."""

import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

import uvicorn

from sscd_vec.app.connections import server_config
from sscd_vec.app.engine import Engine
from sscd_vec.app.limits import Limits
from sscd_vec.app.server import create_app


class Running:
    """A server in a thread, until the block ends.

    Attributes:
        address: Where it listens.
        port: The same, the port alone.
    """

    def __init__(self, engine: Engine, limits: Limits | None = None, **options: Any) -> None:  # noqa: ANN401
        limits = limits or Limits(timeout=300.0, decoding=300.0)  # on a machine at work
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        app = create_app(engine, limits=limits, **options)
        self.server = uvicorn.Server(server_config(app, limits, engine.metrics))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> Self:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server ended while starting"
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()
