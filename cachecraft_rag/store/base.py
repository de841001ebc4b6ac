"""The interface of every tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey


class ChunkStore(ABC):
    """A place for chunk KV with a byte budget that holds at every moment.

    Attributes:
        name: Name of the tier in statistics.
    """

    name: str

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry, which counts as a use of it; ``None`` when it is not there. Callers must not modify it."""

    @abstractmethod
    def put(self, key: ChunkKey, chunk_kv: ChunkKV) -> bool:
        """Keep an entry, replacing an older one of the same key; ``False`` when it is larger than the whole budget."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there; does not count as a use."""

    @abstractmethod
    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry; ``False`` when it was not there."""

    @abstractmethod
    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of all entries of a chunk (``ChunkKey.chunk``), whatever they were computed behind."""

    @abstractmethod
    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all; returns how many."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the store can't be used afterwards."""

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        """``get`` for several keys, in order."""
        return [self.get(key) for key in keys]

    def put_many(self, entries: Iterable[tuple[ChunkKey, ChunkKV]]) -> int:
        """``put`` for several entries; returns how many were kept."""
        return sum(self.put(key, chunk_kv) for key, chunk_kv in entries)
