"""Texts of documents whose KV is not linked to its document yet.

Linking a text means tokenising it, which would slow every retrieval down; so it waits until the text is used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class DocumentTexts:
    """Which documents a text was registered with. Thread-safe.

    Args:
        max_texts: How many texts are remembered over all namespaces; the longest registered goes first.
    """

    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        # The documents of each text, and the chunks that are linked to them: every form of a text is its own chunk.
        self._documents: OrderedDict[tuple[str, str], dict[str, frozenset[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, texts: Iterable[str], namespace: str, document: str) -> None:
        """Note that texts, stripped here, are of a document."""
        with self._lock:
            for text in texts:
                self._documents.setdefault((namespace, text.strip()), {}).setdefault(document, frozenset())
                self._documents.move_to_end((namespace, text.strip()))
            while len(self._documents) > self._max_texts:
                self._documents.popitem(last=False)

    def to_link(self, text: str, namespace: str, chunk: str) -> list[str]:
        """Documents of a text that this was not asked for before with this chunk: each is to be linked to it now.

        Args:
            text: A text, stripped here.
            namespace: Where it was registered.
            chunk: ``ChunkKey.chunk`` of the text, or of a form of it.
        """
        with self._lock:
            documents = self._documents.get((namespace, text.strip()), {})
            unlinked = [document for document, linked in documents.items() if chunk not in linked]
            documents.update({document: documents[document] | {chunk} for document in unlinked})
            return unlinked

    def take(self, namespace: str, document: str) -> list[str]:
        """The texts of a document, which are forgotten."""
        with self._lock:
            taken = [
                name for name, documents in self._documents.items() if name[0] == namespace and document in documents
            ]
            for name in taken:
                del self._documents[name]
            return [text for _, text in taken]

    def clear(self, namespace: str) -> None:
        """Forget a namespace."""
        with self._lock:
            for name in [name for name in self._documents if name[0] == namespace]:
                del self._documents[name]
