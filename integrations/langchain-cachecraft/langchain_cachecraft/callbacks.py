"""Tells the engines which texts were retrieved, with no wiring in the user's chain.

A retriever knows the chunks, the chat model only gets one long prompt, and context variables are lost between the two.
A handler that LangChain adds to every run of the process sees the documents of every retriever before the prompt is
made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from cachecraft_rag import ChunkFeed
from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, DocumentIdKey, texts_by_document

_logger = logging.getLogger(__name__)


class CacheCraftCallbackHandler(BaseCallbackHandler):
    """Gives the texts of retrieved documents to the engines that subscribed to a feed.

    Args:
        feed: The feed; a new one by default.
        document_id_key: Where metadata name the document a chunk was cut from, for the engines'
            ``invalidate(document_ids=...)``: the first of these keys that is there, or ``None`` for nowhere.
    """

    def __init__(self, feed: ChunkFeed | None = None, document_id_key: DocumentIdKey = DOCUMENT_ID_KEYS) -> None:
        self.feed, self.document_id_key = feed if feed is not None else ChunkFeed(), document_id_key

    # Not run inline, little as it does: where one handler is, LangChain's asynchronous on_llm_start calls no others.
    # Events of no interest are ignored, which saves a thread for each, and the printing of all messages.

    @property
    def ignore_chat_model(self) -> bool:
        """Chat model starts are of no interest."""
        return True

    @property
    def ignore_llm(self) -> bool:
        """Nor are tokens."""
        return True

    @property
    def ignore_chain(self) -> bool:
        """Nor are chains."""
        return True

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Register what a retriever returned. A failure is logged: a chain must not end because of a cache."""
        try:
            for name, texts in texts_by_document(documents, self.document_id_key).items():
                self.feed.add(texts, name)
        except Exception:
            _logger.exception("the retrieved documents could not be registered; their chunks are not reused this time")


RETRIEVED = CacheCraftCallbackHandler()
"""The handler of this process."""

_handler: ContextVar[CacheCraftCallbackHandler | None] = ContextVar("cachecraft_handler", default=RETRIEVED)
_install_lock = threading.Lock()
_is_installed = False


def install() -> None:
    """Have LangChain add the handler to every run of this process, from now on; only the first call does anything."""
    global _is_installed
    with _install_lock:
        if not _is_installed:
            register_configure_hook(_handler, inheritable=True)
            _is_installed = True
