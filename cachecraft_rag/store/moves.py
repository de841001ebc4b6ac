"""Keeps entries that travel between tiers from outliving their removal."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachecraft_rag.keys import ChunkKey


class Moves:
    """Moves of one key may overlap; its removal waits for them, and keeps new ones waiting.

    Without this, an entry read from a slow tier could be put into a fast one after it was removed from both.
    """

    def __init__(self) -> None:
        self._under_way: Counter[ChunkKey] = Counter()
        self._halts: list[Callable[[ChunkKey], bool]] = []
        self._changed = threading.Condition()

    @contextmanager
    def moving(self, key: ChunkKey) -> Iterator[None]:
        """While an entry is being read, to be put elsewhere, or written."""
        with self._changed:
            self._changed.wait_for(lambda: not any(halts(key) for halts in self._halts))
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way[key] -= 1
                if not self._under_way[key]:
                    del self._under_way[key]
                self._changed.notify_all()

    @contextmanager
    def halted(self, halts: Callable[[ChunkKey], bool]) -> Iterator[None]:
        """While the entries that ``halts`` is true of are being removed everywhere."""
        with self._changed:
            self._halts.append(halts)
            try:
                self._changed.wait_for(lambda: not any(halts(key) for key in self._under_way))
            except BaseException:
                self._halts.remove(halts)
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._halts.remove(halts)
                self._changed.notify_all()
