"""A chunk cache for retrieval-augmented generation on Hugging Face transformers."""

from __future__ import annotations

from cachecraft_rag.config import EngineConfig, RecomputeConfig, SamplingConfig, SchedulerConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.engine_pool import EngineKey, EnginePool
from cachecraft_rag.errors import (
    CacheCraftError,
    CorruptEntryError,
    DeadlineExceededError,
    EngineBusyError,
    PromptTooLongError,
    RequestCancelledError,
    StoreError,
    StoreUnavailableError,
    UnsupportedModelError,
)
from cachecraft_rag.feed import ChunkFeed
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.registry import ChunkRegistry
from cachecraft_rag.result import AnswerStream, GenerationResult
from cachecraft_rag.splitting import ChunkSplitter
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store_config import StoreConfig
from cachecraft_rag.verify import VerifyReport

__all__ = [
    "AnswerStream",
    "CacheCraftEngine",
    "CacheCraftError",
    "ChunkFeed",
    "ChunkRegistry",
    "ChunkSplitter",
    "CorruptEntryError",
    "DeadlineExceededError",
    "EngineBusyError",
    "EngineConfig",
    "EngineKey",
    "EnginePool",
    "GenerationResult",
    "PromptTooLongError",
    "RagPrompt",
    "RecomputeConfig",
    "RequestCancelledError",
    "RequestStats",
    "SamplingConfig",
    "SchedulerConfig",
    "StoreConfig",
    "StoreError",
    "StoreUnavailableError",
    "UnsupportedModelError",
    "VerifyReport",
]
