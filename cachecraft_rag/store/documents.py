"""Which chunks a document was cut into, so that it can be forgotten as a whole."""

from __future__ import annotations

import shutil
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote, unquote

from cachecraft_rag.keys import digest
from cachecraft_rag.store.redis_client import RedisClient

_Guard = Callable[[str], AbstractContextManager[None]]


class Documents(ABC):
    """Chunks (``ChunkKey.chunk``) by namespace and document. Thread-safe; a document's name itself is not stored."""

    @abstractmethod
    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """Note that a document has these chunks, beside those noted before."""

    @abstractmethod
    def chunks(self, namespace: str, document: str) -> set[str]:
        """The chunks of a document; empty for one that nobody noted."""

    @abstractmethod
    def remove(self, namespace: str, document: str) -> None:
        """Forget a document."""

    @abstractmethod
    def clear(self, namespace: str | None) -> None:
        """Forget the documents of a namespace, or all."""


class MemoryDocuments(Documents):
    """In this process."""

    def __init__(self) -> None:
        self._chunks: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        with self._lock:
            self._chunks[namespace, digest(document)].update(chunks)

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        with self._lock:
            return set(self._chunks.get((namespace, digest(document)), ()))

    def remove(self, namespace: str, document: str) -> None:
        """As ``Documents``."""
        with self._lock:
            self._chunks.pop((namespace, digest(document)), None)

    def clear(self, namespace: str | None) -> None:
        """As ``Documents``."""
        with self._lock:
            for name in [name for name in self._chunks if namespace in (None, name[0])]:
                del self._chunks[name]


class DiskDocuments(Documents):
    """As empty files: ``<root>/<digest of namespace>/<digest of document>/<chunk>``.

    Args:
        root: Their folder.
        guarded: Counts what the file system refuses, instead of raising it.
    """

    def __init__(self, root: Path, guarded: _Guard) -> None:
        self._root, self._guarded = root, guarded

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        with self._guarded("noting a document"):
            folder = self._folder(namespace, document)
            folder.mkdir(parents=True, exist_ok=True)
            for chunk in chunks:
                (folder / quote(chunk, safe="")).touch()

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        found: set[str] = set()
        folder = self._folder(namespace, document)
        with self._guarded("looking up a document"):
            if folder.is_dir():
                found = {unquote(path.name) for path in folder.iterdir()}
        return found

    def remove(self, namespace: str, document: str) -> None:
        """As ``Documents``."""
        self._delete(self._folder(namespace, document))

    def clear(self, namespace: str | None) -> None:
        """As ``Documents``."""
        self._delete(self._root if namespace is None else self._root / digest(namespace))

    def _folder(self, namespace: str, document: str) -> Path:
        return self._root / digest(namespace) / digest(document)

    def _delete(self, folder: Path) -> None:
        with self._guarded("forgetting a document"):
            if folder.is_dir():
                shutil.rmtree(folder)


class RedisDocuments(Documents):
    """As sets ``<prefix>:documents:<digest of namespace>:<digest of document>``, which live as long as entries do.

    Args:
        client: The server.
        prefix: What all our names begin with.
        ttl_ms: Milliseconds without an addition after which a document is forgotten; 0 for never.
        guarded: Counts what the server refuses, instead of raising it.
    """

    def __init__(self, client: RedisClient, prefix: str, ttl_ms: int, guarded: _Guard) -> None:
        self._client, self._prefix, self._ttl_ms, self._guarded = client, f"{prefix}:documents", ttl_ms, guarded

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        names = list(chunks)
        if names and not self._client.is_resting:
            with self._guarded("noting a document"):
                self._client.call("sadd", self._name(namespace, document), *names)
                if self._ttl_ms:
                    self._client.call("pexpire", self._name(namespace, document), self._ttl_ms)

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        found: set[str] = set()
        with self._guarded("looking up a document"):
            found = {name.decode() for name in self._client.call("smembers", self._name(namespace, document))}
        return found

    def remove(self, namespace: str, document: str) -> None:
        """As ``Documents``."""
        with self._guarded("forgetting a document"):
            self._client.call("delete", self._name(namespace, document))

    def clear(self, namespace: str | None) -> None:
        """As ``Documents``."""
        pattern = f"{self._prefix}:{'*' if namespace is None else digest(namespace)}:*"
        with self._guarded("forgetting documents"):
            for name in self._client.call("scan_iter", match=pattern, count=500):
                self._client.call("delete", name)

    def _name(self, namespace: str, document: str) -> str:
        return f"{self._prefix}:{digest(namespace)}:{digest(document)}"


class AllDocuments(Documents):
    """In several places; what any of them knows is known."""

    def __init__(self, places: Sequence[Documents]) -> None:
        self._places = places

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        names = list(chunks)
        for place in self._places:
            place.add(namespace, document, names)

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        return set().union(*(place.chunks(namespace, document) for place in self._places))

    def remove(self, namespace: str, document: str) -> None:
        """As ``Documents``."""
        for place in self._places:
            place.remove(namespace, document)

    def clear(self, namespace: str | None) -> None:
        """As ``Documents``."""
        for place in self._places:
            place.clear(namespace)
