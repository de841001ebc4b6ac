"""Where chunk KV is kept. A store knows keys and tensors, and nothing of prompts or models."""

from __future__ import annotations

from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.memory import MemoryStore

__all__ = ["ChunkStore", "MemoryStore"]
