"""The kinds of store that the contract tests run over."""

from __future__ import annotations

import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from cachecraft_rag.store import ChunkStore, DiskStore, MemoryStore, RedisStore, TieredStore
from tests.redis_server import RedisServer
from tests.store_entries import ENTRY_BYTES, FakeClock, entry

NAMESPACE_BYTES = 64  # the names of namespaces count in a disk's budget


class Kind(ABC):
    """A kind of store, made with room for a number of entries of 16 tokens."""

    clock: FakeClock

    def __init__(self) -> None:
        self.clock = FakeClock()

    @abstractmethod
    def make(self, room: int, ttl_s: float | None = None) -> ChunkStore: ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds


class MemoryKind(Kind):
    def make(self, room: int, ttl_s: float | None = None) -> ChunkStore:
        return MemoryStore(room * entry().nbytes, ttl_s=ttl_s, clock=self.clock)


class DiskKind(Kind):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def make(self, room: int, ttl_s: float | None = None) -> ChunkStore:
        path = tempfile.mkdtemp(dir=self.folder)
        return DiskStore(path, room * ENTRY_BYTES + NAMESPACE_BYTES, ttl_s=ttl_s, clock=self.clock)


class RedisKind(Kind):
    """Time passes for real: the server expires entries by its own clock."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server

    def make(self, room: int, ttl_s: float | None = None) -> ChunkStore:
        prefix = f"t{secrets.token_hex(6)}"
        ttl_s = None if ttl_s is None else ttl_s / 100
        return RedisStore(self.server.url, ttl_s=ttl_s, capacity_bytes=room * ENTRY_BYTES, prefix=prefix)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds / 100)


class TieredKind(DiskKind):
    """Two tiers in memory with room for one entry each, in front of a disk."""

    def make(self, room: int, ttl_s: float | None = None) -> ChunkStore:
        fast = [
            MemoryStore(entry().nbytes, name=name, ttl_s=ttl_s, clock=self.clock, policy="lru")
            for name in ("hot", "warm")
        ]
        disk = super().make(room, ttl_s)
        return TieredStore([*fast, disk])


@pytest.fixture(params=["memory", "disk", "redis", "tiered"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "redis":
        return RedisKind(request.getfixturevalue("redis_server"))
    if request.param == "memory":
        return MemoryKind()
    return DiskKind(tmp_path) if request.param == "disk" else TieredKind(tmp_path)


def settle(store: ChunkStore) -> None:
    """Wait for what goes on in the background."""
    if isinstance(store, TieredStore):
        store.flush()
