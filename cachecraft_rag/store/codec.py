"""Turns chunk KV into bytes that may lie on a disk or in Redis, and back, refusing everything that isn't whole.

What is checked before any of it is used: format version, checksum or GCM tag over every byte, the entry's key, and that
all shards of one version of the entry are there, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
import xxhash

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import Compression, Precision
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey, digest, tensor_bytes, token_bytes
from cachecraft_rag.store.compression import MAX_LEVEL
from cachecraft_rag.store.crypto import check_master_key, seal, unseal
from cachecraft_rag.store.format import (
    PREAMBLE_BYTES,
    ShardHeader,
    describe,
    dtype_name,
    dtype_of,
    read_body,
    read_preamble,
    write_body,
    write_preamble,
)
from cachecraft_rag.store.precision import GROUP, PRECISIONS, PackedKV, pack

SHARD_TOKENS = 1024
"""Most tokens of a shard: a multiple of ``GROUP``, so that groups of int4 don't span shards."""
SHARD_BYTES = 256 * 2**20
"""What a shard's keys and values may take before packing, as far as ``GROUP`` tokens allow: Redis ends at 512 MiB."""

_CHECKSUM_BYTES = 16


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

    def encode(self, key: ChunkKey, chunk_kv: ChunkKV) -> list[bytes]:
        """The entry as shards of at most 1024 tokens, each readable on its own.

        The bytes are the same every time, except for the nonces of encrypted shards and what depends on them.

        Raises:
            ValueError: No tokens, or a dtype that isn't floating point.
        """
        packed = [pack(part, self.precision).to(torch.device("cpu")) for part in _split(chunk_kv)]
        contents = (_checksum(tensor_bytes(tensor)) for part in packed for tensor in part.parts.values())
        entry = digest(self.precision, str(chunk_kv.base), token_bytes(chunk_kv.token_ids), *contents)
        preamble = write_preamble(encrypted=self._master_key is not None)
        return [
            self._seal(key, preamble, write_body(self._header(key, entry, index, packed), part.parts, self.level))
            for index, part in enumerate(packed)
        ]

    def decode(
        self, key: ChunkKey, shards: Sequence[bytes | memoryview], device: torch.device | None = None
    ) -> ChunkKV:
        """The entry that ``encode`` was given, as far as its precision allows; shares no memory with ``shards``.

        Args:
            key: The key it was encoded for.
            shards: All of its shards, in order.
            device: Where keys and values are unpacked; ``None`` is the CPU.

        Raises:
            CorruptEntryError: A byte differs, bytes or shards are missing or too many, it is of another version, key or
                master key, or encrypted against this codec's setting; the message says which.
        """
        if not shards:
            raise CorruptEntryError("no shards")
        opened = [self._open(key, memoryview(shard).cast("B")) for shard in shards]
        first = opened[0][0]
        for index, (header, _) in enumerate(opened):
            if (header.namespace, header.chunk, header.context) != (key.namespace, key.chunk, key.context):
                raise CorruptEntryError(f"belongs to {header.chunk}-{header.context}, not to {key}")
            if (header.shard, header.num_shards) != (index, len(shards)):
                raise CorruptEntryError(
                    f"shard {header.shard} of {header.num_shards} stands as shard {index} of {len(shards)}"
                )
            if header.entry != first.entry:
                raise CorruptEntryError(f"shard {index} belongs to another version of the entry")
        try:
            return _join([_rebuild(header, tensors).unpack(device) for header, tensors in opened])
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            raise CorruptEntryError(f"header and tensors disagree: {error}") from error

    def _header(self, key: ChunkKey, entry: str, index: int, packed: Sequence[PackedKV]) -> ShardHeader:
        part = packed[index]
        fields = {
            "namespace": key.namespace,
            "chunk": key.chunk,
            "context": key.context,
            "entry": entry,
            "shard": index,
            "num_shards": len(packed),
            "token_ids": part.token_ids,
            "base": part.base,
            "precision": part.precision,
            "dtype": dtype_name(part.dtype),
            "key_dim": part.key_dim,
            "value_dim": part.value_dim,
            "compression": self.compression,
            "tensors": describe(part.parts),
        }
        return ShardHeader.model_validate(fields)

    def _seal(self, key: ChunkKey, preamble: bytes, body: bytes) -> bytes:
        if self._master_key is not None:
            return preamble + seal(self._master_key, key, preamble, body)
        return preamble + body + _checksum(preamble, body)

    def _open(self, key: ChunkKey, shard: memoryview) -> tuple[ShardHeader, dict[str, torch.Tensor]]:
        encrypted = read_preamble(shard)
        preamble = bytes(shard[:PREAMBLE_BYTES])
        if self._master_key is not None:
            if not encrypted:
                raise CorruptEntryError("not encrypted, but this store has a master key")
            return read_body(memoryview(unseal(self._master_key, key, preamble, shard[PREAMBLE_BYTES:])))
        if encrypted:
            raise CorruptEntryError("encrypted, but this store has no master key")
        end = len(shard) - _CHECKSUM_BYTES
        if end < PREAMBLE_BYTES:
            raise CorruptEntryError(f"truncated: {len(shard)} bytes hold no checksum")
        if _checksum(shard[:end]) != shard[end:]:
            raise CorruptEntryError("checksum differs: damaged or truncated")
        return read_body(shard[PREAMBLE_BYTES:end])


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


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
        )
        for at in range(0, chunk_kv.num_tokens, size)
    ]


def _rebuild(header: ShardHeader, tensors: dict[str, torch.Tensor]) -> PackedKV:
    dtype = dtype_of(header.dtype)
    return PackedKV(header.precision, dtype, header.key_dim, header.value_dim, header.token_ids, header.base, tensors)


def _join(parts: Sequence[ChunkKV]) -> ChunkKV:
    if len(parts) == 1:
        return parts[0]
    measured = [part.sensitivity for part in parts if part.sensitivity is not None]
    return ChunkKV(
        torch.cat([part.keys for part in parts], dim=2),
        torch.cat([part.values for part in parts], dim=2),
        tuple(token for part in parts for token in part.token_ids),
        parts[0].base,
        torch.cat(measured, dim=1) if measured else None,
    )
