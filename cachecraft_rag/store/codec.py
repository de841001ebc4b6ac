"""Turns chunk KV into bytes that may lie on a disk or in Redis, and back, refusing everything that isn't whole.

What is checked before any of it is used: format version, checksum or GCM tag over every byte, the entry's key, and that
all shards of one version of the entry are there, in order. The header of a shard and each layer are checked on their
own, so that an entry can be used layer by layer while it is still being read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey, digest, tensor_bytes, token_bytes
from cachecraft_rag.store.compression import MAX_LEVEL
from cachecraft_rag.store.crypto import check_master_key, checksum
from cachecraft_rag.store.lazy import LazyKV
from cachecraft_rag.store.precision import GROUP, PRECISIONS, pack
from cachecraft_rag.store.readers import BytesReader, ShardReader
from cachecraft_rag.store.shard import Shard, open_shard, write_shard
from cachecraft_rag.store_config import Compression, Precision

SHARD_TOKENS = 1024
"""Most tokens of a shard: a multiple of ``GROUP``, so that groups of int4 don't span shards."""
SHARD_BYTES = 256 * 2**20
"""What a shard's keys and values may take before packing, as far as ``GROUP`` tokens allow: Redis ends at 512 MiB."""


class EntryCodec:
    """Encodes and decodes entries. Stateless, so threads may share one.

    Decoding follows each entry's own header: entries of another precision or compression stay readable. Not so for
    encryption: with a master key, an entry that isn't encrypted is refused, because anyone could have put it there.

    Args:
        precision: How keys and values are packed.
        compression: ``"zstd"`` compresses the packed tensors, losslessly.
        level: Level of zstd, 1 to 22.
        master_key: At least 16 bytes (see ``load_master_key``): entries are encrypted. ``None``: they are not.

    Raises:
        ValueError: An argument is not one of those.
    """

    def __init__(
        self,
        precision: Precision = "model",
        compression: Compression = "none",
        level: int = 3,
        master_key: bytes | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r} is none of {', '.join(PRECISIONS)}")
        if compression not in get_args(Compression):
            raise ValueError(f"compression: {compression!r} is none of {', '.join(get_args(Compression))}")
        if not 1 <= level <= MAX_LEVEL:
            raise ValueError(f"level: {level} is not in 1 to {MAX_LEVEL}")
        self.precision: Precision = precision
        self.compression: Compression = compression
        self.level = level
        self._master_key = None if master_key is None else check_master_key(master_key)

    @property
    def has_master_key(self) -> bool:
        """Whether entries are encrypted."""
        return self._master_key is not None

    def encode(self, key: ChunkKey, chunk_kv: ChunkKV) -> list[bytes]:
        """The entry as shards of at most 1024 tokens, each readable on its own.

        The bytes are the same every time, except for the nonces of encrypted shards and what depends on them.

        Raises:
            ValueError: No tokens, or a dtype that isn't floating point.
        """
        packed = [pack(part, self.precision).to(torch.device("cpu")) for part in _split(chunk_kv)]
        contents = [checksum(tensor_bytes(tensor)) for part in packed for tensor in part.parts.values()]
        if chunk_kv.inter_attention is not None:
            contents.append(checksum(tensor_bytes(chunk_kv.inter_attention)))
        if chunk_kv.variant is not None:
            contents.append(chunk_kv.variant.to_json())
        entry = digest(self.precision, str(chunk_kv.base), token_bytes(chunk_kv.token_ids), *contents)
        settings = self.compression, self.level, self._master_key
        return [write_shard(key, entry, index, len(packed), part, *settings) for index, part in enumerate(packed)]

    def open(
        self,
        key: ChunkKey,
        readers: Sequence[ShardReader],
        *,
        device: torch.device | None = None,
        on_corrupt: Callable[[], None] | None = None,
        on_read: Callable[[int, float], None] | None = None,
    ) -> LazyKV:
        """The entry to be read layer by layer; only headers and sensitivity are read and verified before it returns.

        Args:
            key: The key it was encoded for.
            readers: All of its shards, in order; closed when they aren't needed any more, also when this raises.
            device: Where keys and values are unpacked; ``None`` is the CPU.
            on_corrupt: See ``LazyKV``; not called for what this raises.
            on_read: See ``LazyKV``.

        Raises:
            CorruptEntryError: A header is damaged, shards are missing, cut off or too many, it is of another version,
                key or master key, or encrypted against this codec's setting; the message says which.
            OSError: The medium refuses.
        """
        try:
            shards = [open_shard(key, reader, self._master_key) for reader in readers]
            _check(key, shards)
            return LazyKV(shards, device=device, on_corrupt=on_corrupt, on_read=on_read)
        except BaseException:
            for reader in readers:
                reader.close()
            raise

    def decode(
        self, key: ChunkKey, shards: Sequence[bytes | memoryview], device: torch.device | None = None
    ) -> ChunkKV:
        """The entry that ``encode`` was given, as far as its precision allows; shares no memory with ``shards``.

        Args:
            key: The key it was encoded for.
            shards: All of its shards, in order.
            device: Where keys and values are unpacked; ``None`` is the CPU.

        Raises:
            CorruptEntryError: As ``open``, or any byte differs.
        """
        return self.open(key, [BytesReader(shard) for shard in shards], device=device).complete()


def _check(key: ChunkKey, shards: Sequence[Shard]) -> None:
    """Whether shards are those of one entry, in order.

    Raises:
        CorruptEntryError: They are not.
    """
    if not shards:
        raise CorruptEntryError("no shards")
    first = shards[0]
    for index, shard in enumerate(shards):
        header = shard.header
        if (header.namespace, header.chunk, header.context) != (key.namespace, key.chunk, key.context):
            raise CorruptEntryError(f"belongs to {header.chunk}-{header.context}, not to {key}")
        if (header.shard, header.num_shards) != (index, len(shards)):
            raise CorruptEntryError(
                f"shard {header.shard} of {header.num_shards} stands as shard {index} of {len(shards)}"
            )
        if header.entry != first.header.entry:
            raise CorruptEntryError(f"shard {index} belongs to another version of the entry")
        if shard.kind != first.kind:
            raise CorruptEntryError(f"shard {index} is of another kind than shard 0: {shard.kind}, not {first.kind}")


def _split(chunk_kv: ChunkKV) -> list[ChunkKV]:
    bytes_per_token = max(1, (chunk_kv.keys.nbytes + chunk_kv.values.nbytes) // max(1, chunk_kv.num_tokens))
    fitting = SHARD_BYTES // bytes_per_token // GROUP * GROUP
    size = min(SHARD_TOKENS, max(GROUP, fitting))
    if chunk_kv.num_tokens <= size:
        return [chunk_kv]
    return [
        ChunkKV(
            chunk_kv.keys[:, :, at : at + size],
            chunk_kv.values[:, :, at : at + size],
            chunk_kv.token_ids[at : at + size],
            chunk_kv.base + at,
            None if chunk_kv.sensitivity is None else chunk_kv.sensitivity[:, at : at + size],
            chunk_kv.is_lossy,
            chunk_kv.variant,
            None if chunk_kv.inter_attention is None else chunk_kv.inter_attention[at : at + size],
        )
        for at in range(0, chunk_kv.num_tokens, size)
    ]
