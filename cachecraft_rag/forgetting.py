"""What is computed while something is forgotten must not bring it back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Forgetting:
    """Counts how often something was forgotten in every namespace. Thread-safe.

    Whoever looks chunks up notes the count, and stores nothing of them once it has changed: they may have been among
    what went. Re-entrant, since storing one thing may lead to another.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()

    def count(self, namespace: str) -> int:
        """How often something was forgotten in a namespace; waits while something is."""
        with self._lock:
            return self._counts[namespace]

    @contextmanager
    def forgetting(self, namespace: str) -> Iterator[None]:
        """Let nothing be stored while the block lasts, nor ever what was looked up before it."""
        with self._lock:
            self._counts[namespace] += 1
            yield

    @contextmanager
    def keeping(self, namespace: str, since: int) -> Iterator[bool]:
        """Let nothing be forgotten while the block lasts; gives whether nothing was since a count was noted."""
        with self._lock:
            yield self._counts[namespace] == since
