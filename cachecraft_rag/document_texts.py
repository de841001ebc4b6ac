"""Texts of documents whose KV is not linked to its document yet.

Linking a text means tokenising it, which would slow every retrieval down; so it waits until the text is used.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

RELINK_S = 900.0  # well below ``LINK_LIFE_S`` of the store: what is used again after its KV went is linked again


class DocumentTexts:
    """Which documents a text was registered with. Thread-safe.

    Args:
        max_texts: How many texts are remembered over all namespaces; the longest registered goes first.
        clock: Source of the time in seconds.
    """

    def __init__(self, max_texts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_texts, self._clock = max_texts, clock
        # The documents of each text, and when which chunk was linked to them: every form of a text is its own chunk.
        self._documents: OrderedDict[tuple[str, str], dict[str, dict[str, float]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, texts: Iterable[str], namespace: str, document: str) -> None:
        """Note that texts, stripped here, are of a document."""
        with self._lock:
            for text in texts:
                self._documents.setdefault((namespace, text.strip()), {}).setdefault(document, {})
                self._documents.move_to_end((namespace, text.strip()))
            while len(self._documents) > self._max_texts:
                self._documents.popitem(last=False)

    def to_link(self, text: str, namespace: str, chunk: str) -> list[str]:
        """Documents of a text that are to be linked to a chunk now: they were not yet, or long ago.

        Args:
            text: A text, stripped here.
            namespace: Where it was registered.
            chunk: ``ChunkKey.chunk`` of the text, or of a form of it.
        """
        with self._lock:
            documents, now = self._documents.get((namespace, text.strip()), {}), self._clock()
            unlinked = [name for name, linked in documents.items() if now >= linked.get(chunk, -math.inf) + RELINK_S]
            for document in unlinked:
                documents[document][chunk] = now
            return unlinked

    def take(self, namespace: str, document: str) -> list[str]:
        """The texts of a document, which is forgotten with those that are of no other document."""
        with self._lock:
            taken = [
                name for name, documents in self._documents.items() if name[0] == namespace and document in documents
            ]
            for name in taken:
                documents = self._documents[name]
                del documents[document]
                if not documents:  # otherwise the text is of other documents too, which keep it
                    del self._documents[name]
            return [text for _, text in taken]

    def clear(self, namespace: str) -> None:
        """Forget a namespace."""
        with self._lock:
            for name in [name for name in self._documents if name[0] == namespace]:
                del self._documents[name]
