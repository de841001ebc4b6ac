"""Looks at a disk store from outside, without changing anything in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.disk_index import DiskEntry
from cachecraft_rag.store.disk_layout import DiskLayout, EntryName, measure, read_shards
from cachecraft_rag.store.entry_check import EntryCheck, check_shards
from cachecraft_rag.store.entry_info import EntryInfo


class DiskSurvey:
    """What lies in the folder of a ``DiskStore``, for tools beside the processes that use it.

    A ``DiskStore`` makes its folders, takes a lock, deletes leftovers and keeps to a budget. A survey does nothing of
    the kind, and reading an entry doesn't count as a use.

    Args:
        path: The folder that the store was given.
        codec: As the store's; only the master key matters.
        name: Name of the tier.

    Attributes:
        path, name: As given.
    """

    def __init__(self, path: str | os.PathLike[str], codec: EntryCodec | None = None, name: str = "disk") -> None:
        self.path, self.name = path, name
        self._layout = DiskLayout(path)
        self._codec = EntryCodec() if codec is None else codec

    @property
    def is_store(self) -> bool:
        """Whether there is a store at the path."""
        return self._layout.root.is_dir()

    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """All entries of a namespace, or of all, in no order; of two with one key the newer.

        Raises:
            OSError: A folder can't be read.
        """
        return [entry_info(entry, self.name, pinned=False) for entry in self._find(namespace)]

    def verify(self, namespace: str | None = None) -> Iterator[EntryCheck]:
        """Read every entry of a namespace, or all, in full.

        Raises:
            OSError: A folder can't be read.
        """
        for entry in self._find(namespace):
            check = check_entry(entry, entry_info(entry, self.name, pinned=False), self._codec)
            if check is not None:
                yield check

    def _find(self, namespace: str | None) -> list[DiskEntry]:
        found: dict[ChunkKey, DiskEntry] = {}
        for folder in self._layout.namespace_folders():
            name = self._layout.namespace_of(folder)
            if name is None or namespace not in (None, name):
                continue
            for path in self._paths(folder):
                entry = _entry_at(path, name)
                if entry is None:
                    continue
                other = found.get(entry.key)
                if other is None or other.name.written < entry.name.written:
                    found[entry.key] = entry
        return list(found.values())

    def _paths(self, folder: Path) -> Iterator[Path]:
        """What lies in a namespace's folder, as far as nobody deletes it meanwhile."""
        with suppress(FileNotFoundError):
            for bucket in self._layout.buckets(folder):
                with suppress(FileNotFoundError, NotADirectoryError):
                    yield from bucket.iterdir()


def entry_info(entry: DiskEntry, tier: str, pinned: bool) -> EntryInfo:
    """What is known of an entry on the disk, uses by other processes included."""
    seen = replace(entry)  # the index must learn of those uses in its own way
    seen.look_again()
    return EntryInfo(entry.key, tier, entry.nbytes, seen.used_at, entry.name.saving, entry.name.static, pinned)


def check_entry(entry: DiskEntry, info: EntryInfo, codec: EntryCodec) -> EntryCheck | None:
    """Read an entry in full; ``None`` when it is gone meanwhile."""
    try:
        return check_shards(info, read_shards(entry.path), codec)
    except FileNotFoundError:
        return None
    except CorruptEntryError as error:
        return EntryCheck(info, "damaged", str(error))
    except OSError as error:
        return EntryCheck(info, "unreadable", f"{type(error).__name__}: {error.strerror}")


def _entry_at(path: Path, namespace: str) -> DiskEntry | None:
    name = EntryName.parse(path.name)
    if name is None:
        return None
    try:
        return DiskEntry(ChunkKey(namespace, name.chunk, name.context), path, name, *measure(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
