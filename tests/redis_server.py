"""A real redis-server for tests: on a free port, without persistence, stopped afterwards."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

_START_S = 20.0


_BUS = 10_000  # a cluster's node listens on a second port, so much higher


def free_port() -> int:
    """A port that is free, as is the second one of a cluster's node.

    Both are below 32,768: above, connections of other programs get their own ports from the system at any moment.
    """
    while True:
        port = random.randrange(20_000, 22_700)
        if _is_free(port) and _is_free(port + _BUS):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class RedisServer:
    """A server process that can be killed and started again on the same port.

    Args:
        folder: Where it runs.
        options: Further options of redis-server.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*command, *self.options], cwd=self.folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, f"redis-server ended with {self._process.returncode}"
                    assert time.monotonic() < deadline, "redis-server did not answer"
                    time.sleep(0.02)

    def client(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis(port=self.port)

    def kill(self) -> None:
        """End it at once, as a crash would; all it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def need_redis_server() -> None:
    """Skip the test where there is no redis-server; in CI there must be one."""
    if shutil.which("redis-server") is None:
        message = "redis-server is not installed (apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that all tests share: each uses a prefix of its own."""
    need_redis_server()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of one test, which may kill it."""
    need_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
