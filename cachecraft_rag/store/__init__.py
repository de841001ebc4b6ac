"""Where chunk KV is kept. A store knows keys and tensors, and nothing of prompts or models."""

from __future__ import annotations

from cachecraft_rag.store.base import ChunkStore, Found
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.disk import DiskStore
from cachecraft_rag.store.memory import MemoryStore
from cachecraft_rag.store.redis import RedisStore
from cachecraft_rag.store.tier_stats import TierStats
from cachecraft_rag.store.tiered import TieredStore

__all__ = ["ChunkStore", "DiskStore", "EntryCodec", "Found", "MemoryStore", "RedisStore", "TierStats", "TieredStore"]
