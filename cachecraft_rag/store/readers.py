"""Where the bytes of a stored shard are read from, piece by piece."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np


class ShardReader(Protocol):
    """A shard's bytes. Threads may read different pieces at once, but must be done before it is closed."""

    @property
    def size(self) -> int:
        """Bytes of the shard."""

    def read_at(self, offset: int, length: int) -> memoryview:
        """So many bytes from an offset on; fewer where the shard ends.

        Raises:
            OSError: The medium refuses.
        """

    def close(self) -> None:
        """Let go of the file or the bytes; may be called again."""


class BytesReader:
    """A shard in memory; what is read is not copied, and read-only.

    Args:
        shard: Its bytes.
    """

    def __init__(self, shard: bytes | memoryview) -> None:
        self._shard = memoryview(shard).cast("B").toreadonly()
        self.size = len(self._shard)

    def read_at(self, offset: int, length: int) -> memoryview:
        """A view."""
        return self._shard[offset : offset + length]

    def close(self) -> None:
        """Let go of the bytes."""
        self._shard = memoryview(b"")


class FileReader:
    """A shard in a file, which may be deleted while it is open and still reads right. What is read may be written to.

    The file is never mapped into memory: one that another process cuts off would end this process.

    Args:
        path: The file.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # a thread may still be reading then
        self.size = os.fstat(self._descriptor).st_size
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only a hint: read ahead while the header is looked at
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def read_at(self, offset: int, length: int) -> memoryview:
        """The bytes, in memory of their own."""
        buffer: memoryview = np.empty(length, np.uint8).data
        found = 0
        while found < length and (count := os.preadv(self._descriptor, [buffer[found:]], offset + found)):
            found += count
        return buffer[:found]

    def close(self) -> None:
        """Close the file."""
        self._close()


def open_file(path: Path) -> ShardReader:
    """A reader of a file; where the system can't read at an offset (Windows), one of its bytes, read at once.

    Raises:
        OSError: It can't be read.
    """
    return FileReader(path) if hasattr(os, "preadv") else BytesReader(path.read_bytes())
