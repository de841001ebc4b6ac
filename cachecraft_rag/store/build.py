"""From settings to a store."""

from __future__ import annotations

from cachecraft_rag.config import StoreConfig
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.crypto import load_master_key
from cachecraft_rag.store.disk import DiskStore
from cachecraft_rag.store.memory import MemoryStore
from cachecraft_rag.store.redis import RedisStore
from cachecraft_rag.store.tiered import TieredStore


def open_store(config: StoreConfig) -> ChunkStore:
    """Open the tiers that are configured; one tier alone needs nothing around it.

    A folder or server that can't be used is no error here: its tier answers with misses and says so once.

    Raises:
        ValueError: The master key can't be read, or a URL is none of a known kind.
    """
    cold = config.cold
    tiers: list[ChunkStore] = [
        MemoryStore(
            cold.size,
            name="cold",
            policy=cold.policy,
            precision=cold.precision,
            ttl_s=cold.ttl_s,
            demote_after_s=cold.demote_after_s,
        )
    ]
    master_key = None if config.master_key is None else load_master_key(config.master_key)
    if config.disk is not None:
        disk = config.disk
        codec = EntryCodec(disk.precision, disk.compression, master_key=master_key)
        tiers.append(DiskStore(disk.path, disk.size, codec, disk.policy, disk.ttl_s))
    if config.remote is not None:
        remote = config.remote
        codec = EntryCodec(remote.precision, remote.compression, master_key=master_key)
        tiers.append(RedisStore(remote.url, codec, remote.ttl_s, remote.size))
    return tiers[0] if len(tiers) == 1 else TieredStore(tiers, config.admit_after)
