"""The tier on a disk: shared by processes, still there after a restart, within its budget all the time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from filelock import FileLock

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.base import check_nbytes
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.disk_index import DiskEntry, DiskIndex
from cachecraft_rag.store.disk_layout import DiskLayout, EntryName, open_shards
from cachecraft_rag.store.disk_survey import check_entry, entry_info
from cachecraft_rag.store.documents import DiskDocuments
from cachecraft_rag.store.entry_check import EntryCheck
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.lazy import LazyKV
from cachecraft_rag.store.persistent import PersistentStore
from cachecraft_rag.store_config import EvictionPolicyName

_LOCK_WAIT_S = 10.0


class DiskStore(PersistentStore):
    """Keeps every entry as a folder of files. Safe for threads and for processes that share the path.

    Writers take turns, so that the bytes of all of them stay within the budget; readers wait for nobody. The budget
    holds for the sizes of all files, and every process must give the same one: the smallest wins. What is evicted while
    a request still reads it is gone from the folders at once; the system frees its blocks when it has been read.

    Args:
        path: Folder on a local file system; made when missing. Only a folder of our own inside it is touched.
        capacity_bytes: Byte budget.
        codec: Turns entries into bytes; the default keeps the model's dtype, uncompressed.
        policy: Which entry goes first: ``"lru"``, ``"lfu"`` or ``"saving"``.
        ttl_s: Seconds without use after which an entry is dropped; ``None`` keeps it. Static entries are exempt.
        clock: Source of the time in seconds, the same for all processes.
        name: Name of the tier in statistics.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        codec: EntryCodec | None = None,
        policy: EvictionPolicyName = "lru",
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
        name: str = "disk",
    ) -> None:
        super().__init__(name)
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is negative; give 0 or more bytes")
        if ttl_s is not None and ttl_s <= 0:
            raise ValueError(f"ttl_s: {ttl_s} is not positive; give seconds above 0, or None")
        self.capacity_bytes = capacity_bytes
        self._codec = EntryCodec() if codec is None else codec
        self._ttl_s, self._clock = ttl_s, clock
        self._layout = DiskLayout(path)
        self.documents = DiskDocuments(self._layout.root / "documents", self._guarded)
        self._index = DiskIndex(self._layout, policy, lambda foreign: self.counters.count("corrupt"))
        self._lock = threading.RLock()  # guards the index
        self._writing = threading.Lock()  # one writer per process waits for the file lock
        self._file_lock = FileLock(str(self._layout.lock_path), timeout=_LOCK_WAIT_S)
        with self._guarded("opening"):
            self._layout.create()
            with self._writing, self._file_lock:
                self._layout.remove_leftovers()
                with self._lock:
                    self._refresh()
                    self._make_room(None, 0)

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Write an entry; it survives a power cut once this returns ``True``."""
        shards = self._codec.encode(key, chunk_kv)
        name = EntryName.new(key, round(chunk_kv.num_tokens * (1.0 - cfo)), static)
        nbytes = sum(len(shard) for shard in shards)
        is_kept = False
        with self._guarded("writing"):
            self._layout.create()
            with self._writing, self._file_lock:
                with self._lock:
                    self._refresh()
                    self._delete(key)
                    has_room = self._make_room(key, nbytes)
                if has_room:
                    now = self._clock()
                    path = self._layout.publish(key, name, shards, now)  # requests go on reading meanwhile
                    with self._lock:
                        known = self._index.entries.get(key)
                        if known is None or known.path != path:
                            self._index.add(DiskEntry(key, path, name, nbytes, now))
                    is_kept = True
        return is_kept

    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there."""
        is_there = False
        with self._guarded("looking up"), self._lock:
            is_there = self._find(key) is not None
        return is_there

    def touch(self, key: ChunkKey) -> bool:
        """Whether the entry is there, which counts as a use."""
        entry = None
        with self._guarded("looking up"), self._lock:
            entry = self._find(key)
        if entry is not None:
            self._note_use(entry)
        return entry is not None

    def remove(self, key: ChunkKey) -> bool:
        """Delete an entry; one that can't be deleted is never served again by this process."""
        is_removed = False
        with self._guarded("removing"), self._lock:
            is_removed = self._find(key) is not None and self._delete(key)
        return is_removed

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries."""
        with self._guarded("looking up"), self._lock:
            self._refresh()
        with self._lock:
            return self._index.variants(chunk)

    def clear(self, namespace: str | None = None) -> int:
        """Delete the entries of a namespace, or all."""
        cleared = 0
        self.documents.clear(namespace)
        with self._guarded("clearing"), self._lock:
            self._refresh()
        with self._lock:
            for key in [key for key in self._index.entries if namespace in (None, key.namespace)]:
                with self._guarded("clearing"):
                    cleared += self._delete(key)
        return cleared

    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """The entries of a namespace, or all."""
        return [entry_info(entry, self.name, entry.key in self._pins) for entry in self._listed(namespace)]

    def verify(self, namespace: str | None = None) -> Iterator[EntryCheck]:
        """Read every entry of a namespace, or all, in full; ``DiskSurvey`` does so without opening a store."""
        for entry in self._listed(namespace):
            check = check_entry(entry, entry_info(entry, self.name, entry.key in self._pins), self._codec)
            if check is not None:
                yield check

    def shrink(self, nbytes: int) -> int:
        """Evict until the files of all processes take at most so many bytes."""
        check_nbytes(nbytes)
        num_gone = 0
        with self._guarded("shrinking"), self._writing, self._file_lock, self._lock:
            self._refresh()
            num_gone = self._evict_down_to(nbytes)
        return num_gone

    @property
    def nbytes(self) -> int:
        """Bytes of all files, those of other processes included."""
        with self._guarded("measuring"), self._lock:
            self._refresh()
        with self._lock:
            return self._index.nbytes

    @property
    def capacity(self) -> int:
        """Byte budget."""
        return self.capacity_bytes

    def __len__(self) -> int:
        with self._guarded("measuring"), self._lock:
            self._refresh()
        with self._lock:
            return len(self._index.entries)

    def close(self) -> None:
        """Wait for a write under way; the entries stay on the disk."""
        with self._writing:
            self._file_lock.release(force=True)

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``."""
        super().unpin(key)
        with self._lock:
            self._index.policy.release(key)

    def _opened(self, key: ChunkKey, on_read: Callable[[int, float], None]) -> LazyKV | None:
        with self._lock:
            entry = self._find(key)
        if entry is None:
            return None
        discard = partial(self._discard, entry)
        try:
            lazy = self._codec.open(key, open_shards(entry.path), on_corrupt=discard, on_read=on_read)
        except FileNotFoundError:  # another process removed or replaced it since
            with self._lock:
                if self._index.entries.get(key) is entry:
                    self._index.forget(key)
            return None
        except CorruptEntryError:
            discard()
            return None
        self._note_use(entry)
        return lazy

    def _note_use(self, entry: DiskEntry) -> None:
        now = self._clock()
        with self._lock:
            if self._index.entries.get(entry.key) is entry:
                self._index.use(entry, now)
        with self._guarded("noting a use"), suppress(FileNotFoundError):  # evicted meanwhile
            os.utime(entry.path, (now, now))

    def _discard(self, entry: DiskEntry) -> None:
        """Count a damaged entry, and delete it unless another has taken its place."""
        self.counters.count("corrupt")
        with self._guarded("removing"), self._lock:
            if self._index.entries.get(entry.key) is entry:
                self._delete(entry.key)

    def _find(self, key: ChunkKey) -> DiskEntry | None:
        self._index.refresh_bucket(self._layout.bucket(key))
        self._expire()
        return self._index.entries.get(key)

    def _refresh(self) -> None:
        self._index.refresh()
        self._expire()

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        for entry in self._index.unused_since(self._clock() - self._ttl_s):
            self._delete(entry.key)
            self.counters.count("expired")

    def _make_room(self, key: ChunkKey | None, nbytes: int) -> bool:
        """Evict until so many bytes fit, ``False`` and nothing evicted when they never will. With the lock held."""
        entries = self._index.entries
        pinned = sum(entries[name].nbytes for name in self._pins.held() - {key} if name in entries)
        if key is not None and not self._layout.namespace_folder(key.namespace).exists():
            nbytes += len(key.namespace.encode())
        if nbytes > self.capacity_bytes - pinned - self._index.overhead:
            return False
        most = self.capacity_bytes - nbytes - self._layout.temporary_bytes()
        self._evict_down_to(most)
        return self._index.nbytes <= most

    def _evict_down_to(self, nbytes: int) -> int:
        """Evict until entries and names take at most so many bytes, or all are pinned. With the lock held."""
        num_gone = 0
        while self._index.nbytes > nbytes:
            victim = self._index.policy.victim(lambda name: name in self._pins)
            if victim is None:
                break
            entry = self._index.entries[victim]
            if entry.look_again():
                self._index.use(entry, entry.used_at)
            elif self._delete(victim):
                self.counters.count("evictions")
                num_gone += 1
        return num_gone

    def _listed(self, namespace: str | None) -> list[DiskEntry]:
        with self._guarded("listing"), self._lock:
            self._refresh()
        with self._lock:
            return [entry for entry in self._index.entries.values() if namespace in (None, entry.key.namespace)]

    def _delete(self, key: ChunkKey) -> bool:
        entry = self._index.entries.get(key)
        if entry is None:
            return False
        self._index.forget(key)
        return self._index.delete(entry.path)
