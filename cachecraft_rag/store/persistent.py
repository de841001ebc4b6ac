"""What the tiers that keep entries as bytes have in common: the disk and Redis."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, TypeVar

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError, StoreUnavailableError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.lazy import LazyKV

_KV = TypeVar("_KV", ChunkKV, LazyKV)


class PersistentStore(ChunkStore):
    """A tier whose entries outlive the process, read in full by ``get`` and layer by layer by ``open``."""

    is_persistent: ClassVar[bool] = True

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry, read and decoded."""
        return self._look_up(key, LazyKV.complete)

    def open(self, key: ChunkKey) -> LazyKV | None:
        """The entry, its header read and verified, its layers to be read when they are needed."""
        return self._look_up(key, lambda lazy: lazy)

    @abstractmethod
    def _opened(self, key: ChunkKey, on_read: Callable[[int, float], None]) -> LazyKV | None:
        """The entry, noted as used; one that is damaged, now or when it is read, is counted and removed."""

    def _look_up(self, key: ChunkKey, use: Callable[[LazyKV], _KV]) -> _KV | None:
        started = time.perf_counter()
        num_tokens, open_s = 0, 0.0
        kv: _KV | None = None

        def loaded(nbytes: int, seconds: float) -> None:
            self.counters.loaded(num_tokens, nbytes, open_s + seconds)

        with self._guarded("reading"):
            lazy = self._opened(key, loaded)
            if lazy is not None:
                num_tokens, open_s = lazy.num_tokens, time.perf_counter() - started
                with suppress(CorruptEntryError):  # counted already
                    kv = use(lazy)
        if kv is None:
            self.counters.count("misses")
            return None
        self.counters.hit(num_tokens, time.perf_counter() - started)
        return kv

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Count and log what the medium refuses, instead of raising it."""
        try:
            yield
        except (OSError, StoreUnavailableError) as error:
            self.counters.error(doing, error)
