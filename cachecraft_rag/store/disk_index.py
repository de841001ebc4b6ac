"""What one process knows of a disk store, kept true by looking at what changed."""

from __future__ import annotations

import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.disk_layout import DiskLayout, EntryName, measure
from cachecraft_rag.store.eviction import EvictionPolicy, make_policy
from cachecraft_rag.store_config import EvictionPolicyName

_RACY_NS = 100_000_000  # a folder that changed this shortly before it was read may have changed again unnoticed


@dataclass(eq=False)
class DiskEntry:
    """One entry on the disk.

    Attributes:
        key: Its key.
        path: Its folder.
        name: What the folder's name says.
        nbytes: Bytes of its files.
        used_at: When it was last used, as far as this process knows.
    """

    key: ChunkKey
    path: Path
    name: EntryName
    nbytes: int
    used_at: float

    def look_again(self) -> bool:
        """Learn of uses by other processes; whether there were any."""
        try:
            used_at = self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        is_newer = used_at > self.used_at + 1e-3
        self.used_at = max(self.used_at, used_at)
        return is_newer


@dataclass(eq=False)
class _Bucket:
    namespace: str
    changed_ns: int
    read_ns: int
    names: dict[str, ChunkKey]


class DiskIndex:
    """Entries, their sizes and the order in which they are evicted. Not thread-safe: the store locks.

    Args:
        layout: Where they lie.
        policy: Which entry goes first.
        on_foreign: Called for everything found in our folders that is no entry of ours, after it was deleted.
    """

    def __init__(self, layout: DiskLayout, policy: EvictionPolicyName, on_foreign: Callable[[Path], None]) -> None:
        self.policy: EvictionPolicy[ChunkKey] = make_policy(policy)
        self.entries: dict[ChunkKey, DiskEntry] = {}
        self.overhead = 0  # bytes of the files that are no entries
        self._entry_bytes = 0
        self._layout, self._on_foreign = layout, on_foreign
        self._variants: defaultdict[str, set[ChunkKey]] = defaultdict(set)
        self._aging: OrderedDict[ChunkKey, None] = OrderedDict()  # not static, longest unused first
        self._buckets: dict[Path, _Bucket] = {}
        self._namespaces: dict[Path, str] = {}
        self._undeletable: set[Path] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._entry_bytes + self.overhead

    def refresh(self) -> None:
        """Look for changes by other processes everywhere.

        Raises:
            OSError: A folder can't be read, or something in it can't be measured or deleted. All others were read, and
                this one is the next time.
        """
        folders = self._layout.namespace_folders()
        for gone in self._namespaces.keys() - set(folders):
            self.overhead -= len(self._namespaces.pop(gone).encode())
        found: set[Path] = set()
        for folder in folders:
            if self._namespace(folder) is not None:
                found.update(self._layout.buckets(folder))
        entries: list[DiskEntry] = []
        errors: list[OSError] = []
        for path in found | self._buckets.keys():
            try:
                entries += self._changes(path)
            except OSError as error:  # raised below: what the other folders hold must be known all the same
                errors.append(error)
        self._add_all(entries)
        if errors:
            raise errors[0]

    def refresh_bucket(self, path: Path) -> None:
        """Look for changes in one folder of entries."""
        self._add_all(self._changes(path))

    def add(self, entry: DiskEntry) -> None:
        """Take in an entry that lies on the disk; of two with one key the newer stays."""
        if (older := self._take_in(entry)) is not None:
            self.delete(older)

    def _take_in(self, entry: DiskEntry) -> Path | None:
        """``add``, but the older of two entries is still to be deleted: its path."""
        superseded = None
        other = self.entries.get(entry.key)
        if other is not None:
            older, newer = sorted((other, entry), key=lambda one: one.name.written)
            self.forget(entry.key)
            superseded, entry = older.path, newer
        self.entries[entry.key] = entry
        self._entry_bytes += entry.nbytes
        self._variants[entry.key.chunk].add(entry.key)
        self.policy.add(entry.key, entry.nbytes, float(entry.name.saving))
        if not entry.name.static:
            self._aging[entry.key] = None
        bucket = self._buckets.setdefault(entry.path.parent, _Bucket(entry.key.namespace, -1, 0, {}))
        bucket.names[entry.path.name] = entry.key
        return superseded

    def forget(self, key: ChunkKey) -> None:
        """Take out an entry, on the disk or not."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        self._entry_bytes -= entry.nbytes
        self.policy.remove(key)
        self._aging.pop(key, None)
        self._variants[key.chunk].discard(key)
        if not self._variants[key.chunk]:
            del self._variants[key.chunk]
        if (bucket := self._buckets.get(entry.path.parent)) is not None:
            bucket.names.pop(entry.path.name, None)

    def delete(self, path: Path) -> bool:
        """Delete what lies at a path; when that fails it is never looked at again.

        Raises:
            OSError: It can't be deleted.
        """
        self._undeletable.add(path)
        is_deleted = self._layout.unpublish(path)
        self._undeletable.discard(path)
        return is_deleted

    def use(self, entry: DiskEntry, now: float) -> None:
        """Count a use of an entry."""
        entry.used_at = now
        self.policy.use(entry.key)
        if entry.key in self._aging:
            self._aging.move_to_end(entry.key)

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries."""
        return sorted(self._variants.get(chunk, ()), key=str)

    def unused_since(self, latest: float) -> Iterator[DiskEntry]:
        """Entries, static ones left out, that no process used after a moment; the caller takes each out."""
        while self._aging:
            entry = self.entries[next(iter(self._aging))]
            if entry.used_at > latest:
                return
            if entry.look_again() and entry.used_at > latest:
                self._aging.move_to_end(entry.key)
                continue
            yield entry

    def _add_all(self, entries: list[DiskEntry]) -> None:
        """Take in entries in the order of their use, so that they are evicted in it."""
        taken_in = [self._take_in(entry) for entry in sorted(entries, key=lambda entry: entry.used_at)]
        for older in taken_in:
            if older is not None:  # deleted at last: where that fails, nothing is missing
                self.delete(older)

    def _changes(self, path: Path) -> list[DiskEntry]:
        """Forget what is gone from a folder of entries; returns what is new in it."""
        bucket = self._buckets.get(path)
        try:
            changed_ns, read_ns = path.stat().st_mtime_ns, time.time_ns()
            is_read = bucket is not None and bucket.changed_ns == changed_ns
            if bucket is not None and is_read and bucket.read_ns - changed_ns > _RACY_NS:
                return []
            names = set(os.listdir(path))
        except FileNotFoundError:
            if bucket is not None:
                for key in list(bucket.names.values()):
                    self.forget(key)
                del self._buckets[path]
            return []
        namespace = self._namespace(path.parent)
        if namespace is None:
            return []
        if bucket is None:
            bucket = self._buckets[path] = _Bucket(namespace, -1, 0, {})
        for name in bucket.names.keys() - names:
            self.forget(bucket.names[name])
        found = [self._measured(path / name, namespace) for name in names - bucket.names.keys()]
        bucket.changed_ns, bucket.read_ns = changed_ns, read_ns  # not before all of it is known, or it stays unknown
        return [entry for entry in found if entry is not None]

    def _namespace(self, folder: Path) -> str | None:
        if folder not in self._namespaces:
            if folder in self._undeletable:
                return None
            namespace = self._layout.namespace_of(folder)
            if namespace is None:
                self._discard(folder)
                return None
            self._namespaces[folder] = namespace
            self.overhead += len(namespace.encode())
        return self._namespaces[folder]

    def _measured(self, path: Path, namespace: str) -> DiskEntry | None:
        if path in self._undeletable:
            return None
        name = EntryName.parse(path.name)
        try:
            if name is not None:
                return DiskEntry(ChunkKey(namespace, name.chunk, name.context), path, name, *measure(path))
        except FileNotFoundError:  # gone again
            return None
        except NotADirectoryError:
            name = None
        self._discard(path)
        return None

    def _discard(self, path: Path) -> None:
        if self.delete(path):
            self._on_foreign(path)
