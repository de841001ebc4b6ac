"""What the benchmark of the store needs around its tiers: a page cache that can be emptied, and a Redis server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 20.0


def read_all(folder: Path) -> None:
    """Bring every file of a folder into the page cache."""
    for path in _files(folder):
        path.read_bytes()


def drop_page_cache(folder: Path) -> None:
    """Have the system forget what it holds of the files of a folder, so that they are read from the disk again."""
    for path in _files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # pages that are still to be written can't be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def can_drop_page_cache(folder: Path) -> bool:
    """Whether ``drop_page_cache`` works in a folder: not on a file system in memory, nor outside Linux."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    path = folder / "probe"
    path.write_bytes(bytes(2**20))
    drop_page_cache(folder)
    file = os.open(path, os.O_RDONLY)
    try:
        os.preadv(file, [bytearray(1)], 2**19, os.RWF_NOWAIT)  # refuses what would have to be read from the disk
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(file)
        path.unlink()


@contextmanager
def redis_server(url: str | None) -> Iterator[str | None]:
    """URL of a Redis server: the given one, else one that runs for the length of the block, else ``None``."""
    program = shutil.which("redis-server")
    if url is not None or program is None:
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port, server)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"redis-server does not answer on port {port}: {error}") from error
            time.sleep(0.05)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
