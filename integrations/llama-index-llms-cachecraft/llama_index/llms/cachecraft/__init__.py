"""CacheCraft for LlamaIndex: local models that reuse the KV of retrieved chunks."""

from __future__ import annotations

from llama_index.llms.cachecraft.base import CacheCraftLLM
from llama_index.llms.cachecraft.instrumentation import CacheCraftSpanHandler
from llama_index.llms.cachecraft.node_parser import CacheAlignedNodeParser

__all__ = ["CacheAlignedNodeParser", "CacheCraftLLM", "CacheCraftSpanHandler"]
