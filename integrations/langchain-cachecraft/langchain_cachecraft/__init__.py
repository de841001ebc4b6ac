"""LangChain models on cachecraft-rag: local models that reuse the KV of retrieved chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_cachecraft._version import __version__
from langchain_cachecraft.callbacks import CacheCraftCallbackHandler
from langchain_cachecraft.chat_models import ChatCacheCraft
from langchain_cachecraft.llms import CacheCraftLLM
from langchain_cachecraft.retrievers import CacheCraftRetriever
from langchain_cachecraft.splitters import CacheAlignedTextSplitter

if TYPE_CHECKING:
    from langchain_cachecraft.middleware import CacheCraftMiddleware

__all__ = [
    "CacheAlignedTextSplitter",
    "CacheCraftCallbackHandler",
    "CacheCraftLLM",
    "CacheCraftMiddleware",
    "CacheCraftRetriever",
    "ChatCacheCraft",
    "__version__",
]


def __getattr__(name: str) -> object:
    """The middleware needs the package ``langchain``, which the rest does without."""
    if name != "CacheCraftMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from langchain_cachecraft.middleware import CacheCraftMiddleware

    return CacheCraftMiddleware
