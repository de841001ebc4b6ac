"""CacheCraft for LlamaIndex: local models that reuse the KV of retrieved chunks."""

from __future__ import annotations

from llama_index.llms.cachecraft.base import CacheCraftLLM
from llama_index.llms.cachecraft.ingestion import CacheCraftWarmer
from llama_index.llms.cachecraft.instrumentation import CacheCraftPrefillEvent, CacheCraftSpanHandler
from llama_index.llms.cachecraft.node_parser import CacheAlignedNodeParser
from llama_index.llms.cachecraft.postprocessor import CacheCraftPostprocessor
from llama_index.llms.cachecraft.prompt_helper import ChunkAlignedPromptHelper

__all__ = [
    "CacheAlignedNodeParser",
    "CacheCraftLLM",
    "CacheCraftPostprocessor",
    "CacheCraftPrefillEvent",
    "CacheCraftSpanHandler",
    "CacheCraftWarmer",
    "ChunkAlignedPromptHelper",
]
