"""LangChain chat models on cachecraft-rag: local models that reuse the KV of retrieved chunks."""

from __future__ import annotations

from langchain_cachecraft.callbacks import CacheCraftCallbackHandler
from langchain_cachecraft.chat_models import ChatCacheCraft

__all__ = ["CacheCraftCallbackHandler", "ChatCacheCraft"]
