"""From retrievers to engines: texts on their way to a model, whose prompt comes later and names no chunks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from weakref import ReferenceType, ref

from cachecraft_rag.engine import CacheCraftEngine


class ChunkFeed:
    """Registers texts with every engine and namespace that subscribed. Safe to use from any thread.

    That a text is known in a namespace only says what to look for in its prompts; KV never leaves its namespace.

    Args:
        max_texts: How many of the latest texts are kept for those who subscribe later: the first retrieval of a process
            ends before any model is loaded.
        max_subscribers: How many engines and namespaces are served. Beyond that the one whose last ``subscribe`` is
            longest ago is left out until it subscribes again, so that many tenants don't slow down every retrieval.
    """

    def __init__(self, max_texts: int = 4096, max_subscribers: int = 256) -> None:
        for name, value in (("max_texts", max_texts), ("max_subscribers", max_subscribers)):
            if value < 1:
                raise ValueError(f"{name}: {value!r} is too small; give at least 1")
        self._max_texts, self._max_subscribers = max_texts, max_subscribers
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, str | None], None] = OrderedDict()  # texts and their documents
        self._subscribers: OrderedDict[tuple[ReferenceType[CacheCraftEngine], str], None] = OrderedDict()

    def add(self, texts: Iterable[str], document_id: str | None = None) -> None:
        """Register texts with all subscribers, and keep the latest for later ones.

        Args:
            texts: Chunk texts.
            document_id: The document they were cut from, for the engines' ``invalidate``.

        Raises:
            ValueError: ``texts`` is one string.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts: {texts!r} is one string; give a list of strings")
        texts = list(texts)
        with self._lock:
            for text in texts:
                self._latest[text, document_id] = None
                self._latest.move_to_end((text, document_id))
            while len(self._latest) > self._max_texts:
                self._latest.popitem(last=False)
            subscribers = self._open_subscribers()
        for engine, namespace in subscribers:  # not through the engine, which refuses when it is closed meanwhile
            engine.library.register(texts, namespace, document_id)

    def subscribe(self, engine: CacheCraftEngine, namespace: str | None = None) -> None:
        """Give a namespace of an engine the latest texts and all to come.

        Meant to be called before every request: whoever is served already costs next to nothing. Engines are held
        weakly, and dropped when they are closed.

        Args:
            engine: The engine.
            namespace: Whose prompts are looked through; ``None`` takes the engine's.
        """
        subscriber = (ref(engine), engine.config.namespace if namespace is None else namespace)
        with self._lock:
            if subscriber not in self._subscribers:
                # Under the lock, so that whoever returns from here can rely on the texts being known.
                for document_id, texts in self._texts_by_document().items():
                    engine.library.register(texts, subscriber[1], document_id)
                self._open_subscribers()
                self._subscribers[subscriber] = None
            self._subscribers.move_to_end(subscriber)
            while len(self._subscribers) > self._max_subscribers:
                self._subscribers.popitem(last=False)

    def _texts_by_document(self) -> dict[str | None, list[str]]:
        texts: dict[str | None, list[str]] = {}
        for text, document_id in self._latest:
            texts.setdefault(document_id, []).append(text)
        return texts

    def _open_subscribers(self) -> list[tuple[CacheCraftEngine, str]]:
        """Engines that can still answer, with their namespaces; the others are forgotten."""
        served = []
        for subscriber in list(self._subscribers):
            engine = subscriber[0]()
            if engine is None or engine.is_closed:
                del self._subscribers[subscriber]
            else:
                served.append((engine, subscriber[1]))
        return served
