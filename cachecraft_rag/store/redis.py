"""The tier that many processes and machines share: Redis or Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import quote, unquote

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError, StoreUnavailableError
from cachecraft_rag.keys import ChunkKey, digest
from cachecraft_rag.store import redis_scripts as scripts
from cachecraft_rag.store.base import check_nbytes
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.documents import RedisDocuments
from cachecraft_rag.store.entry_check import EntryCheck, check_shards
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.lazy import LazyKV
from cachecraft_rag.store.persistent import PersistentStore
from cachecraft_rag.store.readers import BytesReader
from cachecraft_rag.store.redis_client import RedisClient
from cachecraft_rag.store.redis_listing import list_entries
from cachecraft_rag.store_config import MAX_TTL_S

_STEP = 100  # entries that a shrinking store drops between two looks at what is left


class RedisStore(PersistentStore):
    """Keeps entries in Redis under ``cachecraft:{chunk}:context@namespace`` (meta) and ``...:i`` (shards). Thread-safe.

    The server drops what was not used for the time to live. With a budget, the least recently used entries of all
    processes go first; without one, give the server a ``maxmemory``. Pins hold against evictions by this process.

    Args:
        url: ``redis://host:port/db``, ``rediss://`` (TLS), ``redis+cluster://`` or ``?cluster=true`` for a cluster.
        codec: Turns entries into bytes; the default keeps the model's dtype, uncompressed.
        ttl_s: Seconds without use after which an entry is dropped; ``None`` keeps it. Static entries are exempt.
        capacity_bytes: Byte budget for the entries' bytes; ``None`` leaves it to the server.
        name: Name of the tier in statistics.
        prefix: What all keys begin with.
        timeout_s: Longest wait for an answer, in seconds.
        retry_after_s: Seconds without another attempt after the server could not be reached.

    Raises:
        ImportError: redis-py is missing.
        ValueError: The URL can't be used, or a number is out of its range.
    """

    def __init__(
        self,
        url: str,
        codec: EntryCodec | None = None,
        ttl_s: float | None = 3600.0,
        capacity_bytes: int | None = None,
        name: str = "remote",
        prefix: str = "cachecraft",
        timeout_s: float = 5.0,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(name)
        if ttl_s is not None and not 0.001 <= ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s: {ttl_s} is out of range; give 0.001 to {MAX_TTL_S} seconds, or None")
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is negative; give 0 or more bytes, or None")
        if not prefix.isidentifier():
            raise ValueError(f"prefix: {prefix!r} is no name; use letters, digits and underscores")
        self._client = RedisClient(url, timeout_s, retry_after_s)
        self._codec = EntryCodec() if codec is None else codec
        self._ttl_ms = 0 if ttl_s is None else int(ttl_s * 1000)
        self._capacity_bytes, self._prefix = capacity_bytes, prefix
        self.documents = RedisDocuments(self._client, prefix, self._guarded)
        self._index = [f"{prefix}:{{index}}:{part}" for part in ("uses", "until", "sizes")]

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Store an entry."""
        if self._client.is_resting:
            return False
        is_kept = False
        shards = self._codec.encode(key, chunk_kv)
        with self._guarded("writing"):
            is_kept = self._write(key, shards, 0 if static else self._ttl_ms)
        return is_kept

    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there."""
        is_there = False
        if not self._client.is_resting:
            with self._guarded("looking up"):
                meta = self._client.run(scripts.META, self._names(key)[:1])
                is_there = meta is not None and _namespace(meta) == key.namespace
        return is_there

    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry. Always tried, even shortly after a failure."""
        is_removed = False
        with self._guarded("removing"):
            is_removed = self._remove(key)
        return is_removed

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries."""
        keys: list[ChunkKey] = []
        with self._guarded("looking up"):
            keys = self._variants(chunk)
        return keys

    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all, in small steps that don't hold up the server."""
        cleared = 0
        self.documents.clear(namespace)
        with self._guarded("clearing"):
            pattern = None if namespace is None else f"*@{digest('namespace', namespace)}"
            for member, _ in self._client.call("zscan_iter", self._index[0], match=pattern, count=500):
                cleared += self._remove_member(member.decode())
        return cleared

    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """The entries of a namespace, or all."""
        found: list[EntryInfo] = []
        with self._guarded("listing"):
            for one in list_entries(self._client, self._prefix, self._index, namespace):
                is_pinned = one.key in self._pins
                found.append(EntryInfo(one.key, self.name, one.nbytes, one.used_at, None, not one.expires, is_pinned))
        return found

    def verify(self, namespace: str | None = None) -> Iterator[EntryCheck]:
        """Read every entry of a namespace, or all, in full."""
        for info in self.entries(namespace):
            found = None
            with self._guarded("reading"):
                found = self._client.run(scripts.GET, self._names(info.key), 0)  # 0: its time to live goes on
            if found and _namespace(found[0]) == info.key.namespace and _is_whole(found):
                yield check_shards(info, found[1:], self._codec)

    def shrink(self, nbytes: int) -> int:
        """Drop the least recently used entries of all processes, in small steps that don't hold up the server."""
        check_nbytes(nbytes)
        num_gone = 0
        tried: set[bytes] = set()  # what a full server refuses to take out of the index is named again
        with self._guarded("shrinking"):
            pinned = [_member(name) for name in self._pins.held()]
            while victims := self._client.run(scripts.VICTIMS, self._index, nbytes, _STEP, *pinned):
                if tried.issuperset(victims):
                    break
                tried.update(victims)
                num_gone += sum(self._remove_member(victim.decode()) for victim in victims)
        self.counters.count("evictions", num_gone)
        return num_gone

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self._figures()[1]

    @property
    def capacity(self) -> int | None:
        """Byte budget."""
        return self._capacity_bytes

    def __len__(self) -> int:
        return self._figures()[0]

    def close(self) -> None:
        """Close the connections; the entries stay in Redis."""
        with self._guarded("closing"):
            self._client.close()

    def _opened(self, key: ChunkKey, on_read: Callable[[int, float], None]) -> LazyKV | None:
        """The entry, all of it fetched at once; its time to live begins anew."""
        if self._client.is_resting:
            return None
        found = self._client.run(scripts.GET, self._names(key), self._ttl_ms)
        if not found or _namespace(found[0]) != key.namespace:
            return None
        if not _is_whole(found):
            self.counters.count("evictions")  # by the server: when it is full it spares metas, which are used more
            self._remove(key)
            return None
        if not self._is_indexed(key):
            self._remove(key)  # evicted or cleared while it was being written
            return None
        discard = partial(self._discard, key)
        readers = [BytesReader(shard) for shard in found[1:]]
        try:
            return self._codec.open(key, readers, on_corrupt=discard, on_read=on_read)
        except CorruptEntryError:
            discard()
            return None

    def _discard(self, key: ChunkKey) -> None:
        """Count a damaged entry, and drop it."""
        self.counters.count("corrupt")
        with self._guarded("removing"):
            self._remove(key)

    def _write(self, key: ChunkKey, shards: list[bytes], ttl_ms: int) -> bool:
        nbytes = sum(len(shard) for shard in shards)
        capacity = -1 if self._capacity_bytes is None else self._capacity_bytes
        pinned = [_member(name) for name in self._pins.held()]
        names = self._names(key)
        self._client.run(scripts.REMOVE, names, _context(key))
        # Known to the index before it is written: a process that dies in between leaves too much there, not too little.
        victims = self._client.run(scripts.RESERVE, self._index, _member(key), nbytes, ttl_ms, capacity, *pinned)
        if victims is None:
            return False
        for victim in victims:
            self._remove_member(victim.decode())
            self.counters.count("evictions")
        meta = f"{len(shards)}:{key.namespace}"
        try:
            self._client.run(scripts.PUT, names, ttl_ms, _context(key), meta, *shards)
        except StoreUnavailableError:
            if not self._client.is_resting:  # refused, as when the server is full: take back the reservation
                self._remove(key)
            raise
        if self._client.run(scripts.TOUCH, self._index[:2], _member(key), ttl_ms):
            return True
        self._remove(key)  # evicted or cleared meanwhile, when there was nothing to delete yet
        return False

    def _is_indexed(self, key: ChunkKey) -> bool:
        """Note a use in the index; ``False`` when the entry is not in it."""
        try:
            return bool(self._client.run(scripts.TOUCH, self._index[:2], _member(key), self._ttl_ms))
        except StoreUnavailableError as error:  # a full server still lets read
            self.counters.error("noting a use", error)
            return self._client.call("zscore", self._index[0], _member(key)) is not None

    def _remove(self, key: ChunkKey) -> bool:
        return self._remove_member(_member(key))

    def _remove_member(self, member: str) -> bool:
        """Drop an entry by its name in the index."""
        chunk, context = member.split("+")
        contexts = self._contexts(chunk)
        is_removed = bool(self._client.run(scripts.REMOVE, [f"{contexts}:{context}", contexts], context))
        with self._guarded("updating the index"):  # refused when the server is full; the entry itself is gone
            self._client.run(scripts.FORGET, self._index, member)
        return is_removed

    def _variants(self, chunk: str) -> list[ChunkKey]:
        contexts = self._contexts(quote(chunk, safe=""))
        found = self._client.run(scripts.VARIANTS, [contexts], f"{contexts}:")
        pairs = zip(found[::2], found[1::2], strict=True)
        keys = [
            ChunkKey(_namespace(meta), chunk, unquote(context.decode().partition("@")[0])) for context, meta in pairs
        ]
        return sorted(keys, key=str)

    def _contexts(self, chunk: str) -> str:
        """Name of the set of a chunk's contexts; the braces keep it in one slot with the chunk's entries."""
        return f"{self._prefix}:{{{chunk}}}"

    def _names(self, key: ChunkKey) -> list[str]:
        """Names of an entry's meta and of its chunk's set of contexts."""
        contexts = self._contexts(quote(key.chunk, safe=""))
        return [f"{contexts}:{_context(key)}", contexts]

    def _figures(self) -> tuple[int, int]:
        entries = nbytes = 0
        if not self._client.is_resting:
            with self._guarded("measuring"):
                entries, nbytes = self._client.run(scripts.FORGET, self._index)
        return entries, nbytes


def _context(key: ChunkKey) -> str:
    """An entry's name among those of its chunk."""
    return f"{quote(key.context, safe='')}@{digest('namespace', key.namespace)}"


def _member(key: ChunkKey) -> str:
    """An entry's name in the index."""
    return f"{quote(key.chunk, safe='')}+{_context(key)}"


def _is_whole(found: list[bytes]) -> bool:
    """Whether the server still has every shard of an entry's meta."""
    return len(found) - 1 == int(found[0].partition(b":")[0])


def _namespace(meta: bytes) -> str:
    return meta.partition(b":")[2].decode()
