"""Which keys must not be evicted now."""

from __future__ import annotations

import threading
from collections import Counter

from cachecraft_rag.keys import ChunkKey


class Pins:
    """Reference counts of keys. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[ChunkKey] = Counter()
        self._lock = threading.Lock()

    def pin(self, key: ChunkKey) -> None:
        """Add one reference."""
        with self._lock:
            self._counts[key] += 1

    def unpin(self, key: ChunkKey) -> None:
        """Take one reference away.

        Raises:
            ValueError: There is none.
        """
        with self._lock:
            if not self._counts[key]:
                del self._counts[key]
                raise ValueError(f"key: {key} is not pinned; call pin once for every unpin")
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def count(self, key: ChunkKey) -> int:
        """Number of references."""
        with self._lock:
            return self._counts.get(key, 0)

    def held(self) -> set[ChunkKey]:
        """All keys that are pinned now."""
        with self._lock:
            return set(self._counts)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._counts
