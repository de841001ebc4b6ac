"""Keeps what is known of documents from outgrowing what is stored of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Set
from weakref import WeakMethod

from cachecraft_rag.store.documents import Documents

_FEWEST_ADDED = 1000


class PrunedDocuments(Documents):
    """Documents that are pruned whenever as many links were noted as were left the last time, 1000 at least.

    So there are at most about twice as many as are needed, and looking through all of them costs little for each.

    Args:
        documents: The documents.
        stored: Method of the store that gives every chunk with an entry in any tier, ``None`` when that can't be told
            now. Held weakly: the store has the documents, and its KV is to go with the last who refers to it.
    """

    def __init__(self, documents: Documents, stored: Callable[[], Set[str] | None]) -> None:
        self._documents, self._stored = documents, WeakMethod(stored)
        self._num_added, self._most_added = 0, _FEWEST_ADDED
        self._lock = threading.Lock()

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        names = list(chunks)
        self._documents.add(namespace, document, names)
        with self._lock:
            self._num_added += len(names)
            is_due = self._num_added >= self._most_added
            if is_due:
                self._num_added = 0
        if is_due and (list_stored := self._stored()) is not None and (stored := list_stored()) is not None:
            self.prune(stored)

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        return self._documents.chunks(namespace, document)

    def remove(self, namespace: str, document: str) -> None:
        """As ``Documents``."""
        self._documents.remove(namespace, document)

    def clear(self, namespace: str | None) -> None:
        """As ``Documents``."""
        self._documents.clear(namespace)

    def prune(self, stored: Set[str]) -> int:
        """As ``Documents``."""
        num_left = self._documents.prune(stored)
        with self._lock:
            self._most_added = max(num_left, _FEWEST_ADDED)
        return num_left
