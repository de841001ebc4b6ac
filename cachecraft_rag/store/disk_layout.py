"""How entries lie on a disk, and the file operations that never leave half of one.

    <path>/cachecraft-v1/lock                                        held while a process writes
    <path>/cachecraft-v1/tmp/<host>-<pid>-<unique>/                  being written, or being deleted
    <path>/cachecraft-v1/<digest of namespace>/namespace             the namespace's name
    <path>/cachecraft-v1/<digest of namespace>/<0-f>/<entry>/<i>.kv  shard i of an entry

An entry is a folder, renamed into its place when all its shards are written, and out of it before they are deleted: it
is there as a whole or not at all. Its name says all that an index must know, is never used twice and never changes, so
that a folder's modification time tells whether another process added or removed anything.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey, digest
from cachecraft_rag.store.readers import ShardReader, open_file

FOLDER = "cachecraft-v1"
_ABANDONED_S = 3600.0  # a temporary folder of another host's process is a leftover when it is this old
_NAME = re.compile(r"([^+]+)\+([^+]+)\+([0-9a-f]{24})\+(\d+)\+([cs])")


@dataclass(frozen=True)
class EntryName:
    """Name of an entry's folder.

    Attributes:
        chunk: ``ChunkKey.chunk``.
        context: ``ChunkKey.context``.
        written: When and by whom it was written: 24 hexadecimal digits that sort by time.
        saving: Tokens that a reuse saves.
        static: Whether it is exempt from any time to live.
    """

    chunk: str
    context: str
    written: str
    saving: int
    static: bool

    @classmethod
    def new(cls, key: ChunkKey, saving: int, static: bool) -> EntryName:
        """A name that no other write uses."""
        return cls(key.chunk, key.context, f"{time.time_ns():016x}{secrets.token_hex(4)}", saving, static)

    @classmethod
    def parse(cls, name: str) -> EntryName | None:
        """The name of a folder taken apart; ``None`` when it is no entry."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        chunk, context, written, saving, kind = match.groups()
        return cls(unquote(chunk), unquote(context), written, int(saving), kind == "s")

    def __str__(self) -> str:
        parts = (quote(self.chunk, safe=""), quote(self.context, safe=""), self.written, str(self.saving))
        return "+".join((*parts, "s" if self.static else "c"))


class DiskLayout:
    """The folders and files below one path.

    Args:
        path: Where the folder of this format is made.

    Attributes:
        root: The folder of this format; nothing outside it is ever touched.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(path).expanduser() / FOLDER
        self._temporary = self.root / "tmp"
        self._host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())

    @property
    def lock_path(self) -> Path:
        """File that a writer locks."""
        return self.root / "lock"

    def create(self) -> None:
        """Make the folders that are always there."""
        self._temporary.mkdir(parents=True, exist_ok=True)

    def namespace_folder(self, namespace: str) -> Path:
        """Folder of a namespace's entries."""
        return self.root / digest("namespace", namespace)

    def bucket(self, key: ChunkKey) -> Path:
        """Folder that holds a key's entry, and all other entries of its chunk."""
        return self.namespace_folder(key.namespace) / digest(key.chunk)[0]

    def namespace_folders(self) -> list[Path]:
        """All folders that may be a namespace's."""
        try:
            with os.scandir(self.root) as items:
                return [Path(item.path) for item in items if re.fullmatch("[0-9a-f]{32}", item.name)]
        except FileNotFoundError:
            return []

    def namespace_of(self, folder: Path) -> str | None:
        """Name of the namespace that a folder belongs to; ``None`` when it is none of ours."""
        try:
            name = (folder / "namespace").read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
        return name if self.namespace_folder(name) == folder else None

    def buckets(self, folder: Path) -> list[Path]:
        """The folders of entries in a namespace's folder."""
        with os.scandir(folder) as items:
            return [Path(item.path) for item in items if re.fullmatch("[0-9a-f]", item.name)]

    def publish(self, key: ChunkKey, name: EntryName, shards: Sequence[bytes], used_at: float) -> Path:
        """Write an entry; it appears as a whole, with everything on the disk, or not at all."""
        bucket = self.bucket(key)
        self._make_bucket(bucket, key.namespace)
        written = self._new_temporary()
        try:
            for index, shard in enumerate(shards):
                _write(written / f"{index}.kv", shard)
            _sync_folder(written)
            os.utime(written, (used_at, used_at))
            os.rename(written, bucket / str(name))
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        _sync_folder(bucket)
        return bucket / str(name)

    def unpublish(self, path: Path) -> bool:
        """Delete an entry, or whatever else lies there; ``False`` when nothing does."""
        doomed = self._temporary_path()  # not made beforehand: on a full disk only renaming and deleting still work
        try:
            self._rename(path, doomed)
        except FileNotFoundError:
            return False
        _delete(doomed)
        return True

    def _rename(self, path: Path, doomed: Path) -> None:
        try:
            os.rename(path, doomed)
        except FileNotFoundError:
            if not os.path.lexists(path):
                raise
            self.create()  # somebody removed empty folders, the temporary one among them
            os.rename(path, doomed)

    def remove_leftovers(self) -> None:
        """Delete what killed processes left behind: temporary folders, empty folders. Call with the lock held."""
        with os.scandir(self._temporary) as items:
            leftovers = [Path(item.path) for item in items if self._is_left_over(item)]
        for leftover in leftovers:
            _delete(leftover)
        for folder in self.namespace_folders():
            with suppress(OSError):
                for bucket in self.buckets(folder):
                    with suppress(OSError):  # not empty
                        bucket.rmdir()
                if not self.buckets(folder):
                    self.unpublish(folder)

    def temporary_bytes(self) -> int:
        """Bytes of all that is being written or deleted."""
        nbytes = 0
        for folder, _, names in os.walk(self._temporary):
            for name in names:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    nbytes += os.lstat(os.path.join(folder, name)).st_size
        return nbytes

    def _is_left_over(self, item: os.DirEntry[str]) -> bool:
        host, _, rest = item.name.partition("-")
        pid = rest.partition("-")[0]
        if host == self._host and pid.isdigit() and not _is_running(int(pid)):
            return True
        return time.time() - item.stat(follow_symlinks=False).st_mtime > _ABANDONED_S

    def _new_temporary(self) -> Path:
        folder = self._temporary_path()
        folder.mkdir(parents=True)
        return folder

    def _temporary_path(self) -> Path:
        return self._temporary / f"{self._host}-{os.getpid()}-{secrets.token_hex(8)}"

    def _make_bucket(self, bucket: Path, namespace: str) -> None:
        folder = bucket.parent
        if not folder.is_dir():
            made = self._new_temporary()
            try:
                _write(made / "namespace", namespace.encode())
                os.rename(made, folder)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        bucket.mkdir(exist_ok=True)


def measure(path: Path) -> tuple[int, float]:
    """Bytes of an entry's files, and when it was last used."""
    with os.scandir(path) as items:
        nbytes = sum(item.stat(follow_symlinks=False).st_size for item in items)
    return nbytes, path.stat().st_mtime


def read_shards(path: Path) -> list[bytes]:
    """All shards of an entry, in order.

    Raises:
        CorruptEntryError: There are other files, or shards are missing.
        OSError: The entry is not there, or can't be read.
    """
    return [file.read_bytes() for file in _shard_files(path)]


def open_shards(path: Path) -> list[ShardReader]:
    """All shards of an entry, in order, to be read piece by piece, also after the entry was deleted.

    Raises:
        CorruptEntryError, OSError: As ``read_shards``.
    """
    return [open_file(file) for file in _shard_files(path)]


def _shard_files(path: Path) -> list[Path]:
    found = os.listdir(path)
    names = [f"{index}.kv" for index in range(len(found))]
    if not found or set(names) != set(found):
        path.stat()  # what was listed while somebody deleted it is gone, not damaged
        raise CorruptEntryError(f"{path} lacks shards or holds other files")
    return [path / name for name in names]


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _delete(path: Path) -> None:
    """Delete a file or a whole folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync_folder(path: Path) -> None:
    if os.name != "posix":  # elsewhere a folder can't be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(pid: int) -> bool:
    if os.name != "posix":  # there, signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
