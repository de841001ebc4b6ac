"""A tier in memory: least recently used entries go first."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.base import ChunkStore


class MemoryStore(ChunkStore):
    """Keeps entries as they are given, on whatever device their tensors live. Thread-safe.

    Args:
        capacity_bytes: Byte budget, never exceeded.
        name: Name of the tier in statistics.
    """

    def __init__(self, capacity_bytes: int, name: str = "cold") -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is negative; give 0 or more bytes")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._entries: OrderedDict[ChunkKey, ChunkKV] = OrderedDict()
        self._variants: defaultdict[str, set[ChunkKey]] = defaultdict(set)
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry itself; it becomes the most recently used."""
        with self._lock:
            chunk_kv = self._entries.get(key)
            if chunk_kv is not None:
                self._entries.move_to_end(key)
            return chunk_kv

    def put(self, key: ChunkKey, chunk_kv: ChunkKV) -> bool:
        """Keep an entry; older entries make room before it is counted in."""
        with self._lock:
            self._drop(key)
            if chunk_kv.nbytes > self.capacity_bytes:
                return False
            while self._nbytes + chunk_kv.nbytes > self.capacity_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[key] = chunk_kv
            self._variants[key.chunk].add(key)
            self._nbytes += chunk_kv.nbytes
            return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there."""
        with self._lock:
            return key in self._entries

    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry."""
        with self._lock:
            return self._drop(key)

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries."""
        with self._lock:
            return sorted(self._variants.get(chunk, ()), key=str)

    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all."""
        with self._lock:
            doomed = [key for key in self._entries if namespace in (None, key.namespace)]
            return sum(self._drop(key) for key in doomed)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            return self._nbytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def close(self) -> None:
        """Let go of all tensors."""
        self.clear()

    def _drop(self, key: ChunkKey) -> bool:
        chunk_kv = self._entries.pop(key, None)
        if chunk_kv is None:
            return False
        self._nbytes -= chunk_kv.nbytes
        self._variants[key.chunk].discard(key)
        if not self._variants[key.chunk]:
            del self._variants[key.chunk]
        return True
