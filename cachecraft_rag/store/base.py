"""The interface of every tier."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.documents import Documents, MemoryDocuments
from cachecraft_rag.store.entry_check import EntryCheck
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.pins import Pins
from cachecraft_rag.store.pruned_documents import PrunedDocuments
from cachecraft_rag.store.tier_stats import TierCounters, TierStats


@dataclass(frozen=True, eq=False)
class Found:
    """Where an entry is.

    Attributes:
        tier: Name of the tier that has it.
        kv: The entry, perhaps not read yet; ``None`` where computing it anew is quicker than loading it.
    """

    tier: str
    kv: LayeredKV | None


class ChunkStore(ABC):
    """A place for chunk KV with a byte budget that holds at every moment.

    A failure inside a tier is counted, logged once and answered as a miss: no method but the constructor raises for it.

    Args:
        name: Name of the tier in statistics.

    Attributes:
        name: As given.
        counters: What happened so far.
        documents: Which chunks a document was cut into.
        is_persistent: Whether entries outlive the process and may be seen by others.
    """

    is_persistent: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = TierCounters(name, logging.getLogger(type(self).__module__))
        self.documents: Documents = PrunedDocuments(MemoryDocuments(), self._stored_chunks)
        self._pins = Pins()

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry, which counts as a use of it; ``None`` when it is not there. Callers must not modify it."""

    def open(self, key: ChunkKey) -> LayeredKV | None:
        """Like ``get``, but layers may be left to be unpacked or read when they are needed.

        What turns out to be damaged then is counted and removed, and raises ``CorruptEntryError`` where it is read.
        """
        return self.get(key)

    @abstractmethod
    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Keep an entry, replacing an older one of the same key.

        Args:
            key: Its key.
            chunk_kv: The entry.
            static: Exempt from any time to live, as prompts that never change are.
            cfo: Share of its tokens that a reuse recomputes, 0.0 to 1.0; lowers what keeping it saves.

        Returns:
            ``False`` when it could not be kept: larger than the budget, too much pinned, or the tier fails.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there; does not count as a use."""

    def touch(self, key: ChunkKey) -> bool:
        """Whether the entry is there, which counts as a use where that costs no look at the entry itself."""
        return self.contains(key)

    @abstractmethod
    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry, pinned or not; ``False`` when it was not there."""

    @abstractmethod
    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of all entries of a chunk (``ChunkKey.chunk``), whatever they were computed behind."""

    @abstractmethod
    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all, pinned or not; returns how many."""

    @abstractmethod
    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """The entries of a namespace, or all, in no order; does not count as a use of them."""

    @abstractmethod
    def shrink(self, nbytes: int) -> int:
        """Evict, as for lack of room, until at most so many bytes are held or only pinned entries are left.

        Returns:
            How many entries went.

        Raises:
            ValueError: A negative number of bytes.
        """

    def verify(self, namespace: str | None = None) -> Iterator[EntryCheck]:
        """Read every entry of a namespace, or all, in full, one by one.

        That does not count as a use, and nothing is removed: entries of another master key look damaged too, so it is
        for the caller to ``remove`` them. Tiers in memory have nothing to check.
        """
        return iter(())

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """Byte budget; ``None`` when there is none."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the store can't be used afterwards."""

    def flush(self) -> None:
        """Wait until everything that was put or pushed out so far has reached the tiers it goes to."""
        return

    def get_with_tier(self, key: ChunkKey) -> tuple[ChunkKV, str] | None:
        """``get``, together with the name of the tier that had it."""
        chunk_kv = self.get(key)
        return None if chunk_kv is None else (chunk_kv, self.name)

    def find(self, key: ChunkKey) -> Found | None:
        """Like ``open``, but an entry is only loaded where that is quicker than computing it."""
        kv = self.open(key)
        return None if kv is None else Found(self.name, kv)

    def settle(self, key: ChunkKey, kv: LayeredKV, tier: str) -> None:
        """Take note that an entry that ``find`` gave has been read: from here on it is in a faster tier."""
        return

    def prefetch(self, keys: Iterable[ChunkKey]) -> int:
        """Begin to move entries from slow tiers to memory, without waiting for it; returns how many."""
        return 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take note of how fast KV is computed here: what loading it is measured against."""
        return

    @property
    def readers(self) -> Executor | None:
        """Threads that read ahead from slow tiers; ``None`` without such tiers, or where they are not to be used."""
        return None

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        """``get`` for several keys, in order."""
        return [self.get(key) for key in keys]

    def put_many(self, entries: Iterable[tuple[ChunkKey, ChunkKV]]) -> int:
        """``put`` for several entries; returns how many were kept."""
        return sum(self.put(key, chunk_kv) for key, chunk_kv in entries)

    def _stored_chunks(self) -> set[str] | None:
        """Chunks (``ChunkKey.chunk``) that have entries; ``None`` when not all could be listed."""
        return {info.key.chunk for info in self.entries()}

    def stats(self) -> TierStats:
        """What the tier holds and what happened in it."""
        return self.counters.stats(len(self), self.nbytes, self.capacity)

    def relieve(self) -> int:
        """Make room ahead of need where that costs little, off the path of a request; returns the bytes freed."""
        return 0

    def pin(self, key: ChunkKey) -> None:
        """Keep a key from being evicted until it is unpinned as often as it was pinned; it need not be stored yet."""
        self._pins.pin(key)

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``.

        Raises:
            ValueError: The key is not pinned.
        """
        self._pins.unpin(key)

    def pin_count(self, key: ChunkKey) -> int:
        """How many pins hold a key."""
        return self._pins.count(key)

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Pin keys for the length of a ``with`` block, whichever way it ends."""
        taken: list[ChunkKey] = []
        try:
            for key in keys:
                self.pin(key)
                taken.append(key)
            yield
        finally:
            for key in taken:
                self.unpin(key)


def check_nbytes(nbytes: int) -> None:
    """Refuse a target of ``shrink`` that is none.

    Raises:
        ValueError: It is negative.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes: {nbytes} is negative; give 0 or more bytes")
