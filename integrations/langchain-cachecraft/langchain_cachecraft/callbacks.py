"""Tells the engines which texts were retrieved, with no wiring in the user's chain.

A retriever knows the chunks, the chat model only gets one long prompt, and context variables are lost between the two.
A handler that LangChain adds to every run of the process sees the documents of every retriever before the prompt is
made.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from cachecraft_rag import CacheCraftEngine

_logger = logging.getLogger(__name__)


class CacheCraftCallbackHandler(BaseCallbackHandler):
    """Registers the texts of retrieved documents with the engines that subscribed.

    Texts are registered with every subscriber, whatever its namespace: that only says what to look for in a prompt. KV
    never leaves its namespace.

    Args:
        max_texts: How many of the latest texts are kept for engines that subscribe later: the first retrieval of a
            process ends before any model is loaded.
    """

    run_inline = True  # microseconds of work: not worth a thread in async chains

    def __init__(self, max_texts: int = 1024) -> None:
        self._max_texts = max_texts
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._engines: WeakSet[CacheCraftEngine] = WeakSet()

    @property
    def ignore_chat_model(self) -> bool:
        """Chat model starts are of no interest; ignoring them saves LangChain from printing all messages for us."""
        return True

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Register what a retriever returned. A failure is logged: a chain must not end because of a cache."""
        try:
            self.add(document.page_content for document in documents)
        except Exception:
            _logger.exception("the retrieved documents could not be registered; their chunks are not reused this time")

    def add(self, texts: Iterable[str]) -> None:
        """Register texts with all subscribers, and keep them for later ones."""
        texts = list(texts)
        with self._lock:
            for text in texts:
                self._recent[text] = None
                self._recent.move_to_end(text)
            while len(self._recent) > self._max_texts:
                self._recent.popitem(last=False)
            engines = list(self._engines)
        for engine in engines:
            engine.register(texts)

    def subscribe(self, engine: CacheCraftEngine) -> None:
        """Give an engine the latest texts and all to come. Subscribing twice is harmless; engines are held weakly."""
        with self._lock:
            if engine not in self._engines:
                engine.register(self._recent)
                self._engines.add(engine)


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
