"""Which chunks a document was cut into, so that it can be forgotten as a whole."""

from __future__ import annotations

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from cachecraft_rag.keys import digest
from cachecraft_rag.store import redis_scripts as scripts
from cachecraft_rag.store.redis_client import RedisClient

LINK_LIFE_S = 3600.0
_SHARED_LINK_LIFE_MS = 7 * 24 * 3_600_000  # other machines may have copies, which can't be seen from here

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

    @abstractmethod
    def prune(self, stored: Set[str]) -> int:
        """Forget links to chunks that are not stored and that nobody noted for some time; returns how many are left.

        The time is for what is noted before it is stored, and for copies that only other processes have.
        """


class MemoryDocuments(Documents):
    """In this process.

    Args:
        clock: Source of the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunks: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)  # with the time of the note
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        with self._lock:
            self._chunks[namespace, digest(document)].update(dict.fromkeys(chunks, self._clock()))

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

    def prune(self, stored: Set[str]) -> int:
        """As ``Documents``."""
        with self._lock:
            latest = self._clock() - LINK_LIFE_S
            for name, chunks in list(self._chunks.items()):
                for chunk in [chunk for chunk, noted in chunks.items() if noted < latest and chunk not in stored]:
                    del chunks[chunk]
                if not chunks:
                    del self._chunks[name]
            return sum(map(len, self._chunks.values()))


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
            for chunk in chunks:
                try:
                    (folder / quote(chunk, safe="")).touch()
                except FileNotFoundError:  # the first chunk, or another process has just pruned the empty folder
                    folder.mkdir(parents=True, exist_ok=True)
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

    def prune(self, stored: Set[str]) -> int:
        """As ``Documents``."""
        num_left = 0
        with self._guarded("pruning documents"):
            latest = time.time() - LINK_LIFE_S
            for folder in self._root.glob("*/*"):
                for link in folder.iterdir():
                    if unquote(link.name) not in stored and link.stat().st_mtime < latest:
                        link.unlink(missing_ok=True)
                    else:
                        num_left += 1
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return num_left

    def _folder(self, namespace: str, document: str) -> Path:
        return self._root / digest(namespace) / digest(document)

    def _delete(self, folder: Path) -> None:
        with self._guarded("forgetting a document"):
            if folder.is_dir():
                shutil.rmtree(folder)


class RedisDocuments(Documents):
    """As sorted sets ``<prefix>:links:<digest of namespace>:<digest of document>``, chunks by when they were noted.

    They have no time to live: it would have to be renewed with each use of any entry, by whomever and in any tier.

    Args:
        client: The server.
        prefix: What all our names begin with.
        guarded: Counts what the server refuses, instead of raising it.
    """

    def __init__(self, client: RedisClient, prefix: str, guarded: _Guard) -> None:
        self._client, self._prefix, self._guarded = client, f"{prefix}:links", guarded

    def add(self, namespace: str, document: str, chunks: Iterable[str]) -> None:
        """As ``Documents``."""
        names = list(chunks)
        if names and not self._client.is_resting:
            with self._guarded("noting a document"):
                self._client.run(scripts.LINK, [self._name(namespace, document)], *names)

    def chunks(self, namespace: str, document: str) -> set[str]:
        """As ``Documents``."""
        found: set[str] = set()
        with self._guarded("looking up a document"):
            found = {name.decode() for name in self._client.call("zrange", self._name(namespace, document), 0, -1)}
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

    def prune(self, stored: Set[str]) -> int:
        """As ``Documents``."""
        num_left = 0
        with self._guarded("pruning documents"):
            for name in self._client.call("scan_iter", match=f"{self._prefix}:*", count=500):
                old = self._client.run(scripts.OLD_LINKS, [name], _SHARED_LINK_LIFE_MS)
                gone = [chunk for chunk in old if chunk.decode() not in stored]
                num_left += self._client.run(scripts.UNLINK, [name], _SHARED_LINK_LIFE_MS, *gone)
        return num_left

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

    def prune(self, stored: Set[str]) -> int:
        """As ``Documents``."""
        return sum([place.prune(stored) for place in self._places])
