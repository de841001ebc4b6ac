"""Layout of one stored shard: what stands where in its bytes.

    preamble    magic "CCKV", version (2 bytes), 1 when encrypted, one zero byte
    body        length of the header (4 bytes), header (JSON), zeros up to a multiple of 64, tensors
    checksum    xxh3-128 of all that precedes it (16 bytes)

Numbers are little-endian. In an encrypted shard ``crypto.seal`` of the body follows the preamble, and no checksum.
Uncompressed tensors stand one after the other in the order of the header, each from a multiple of 64 of the shard on,
with the layer as their first dimension: a plain shard can be mapped into memory and read layer by layer, by a reader
that compares the checksum itself. Compressed tensors are one zstd frame (see ``compression``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from cachecraft_rag.config import Compression, Precision
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import tensor_bytes
from cachecraft_rag.store.compression import compress, decompress

DTypeName = Literal["float64", "float32", "float16", "bfloat16", "int8", "uint8"]
_Count = Annotated[int, Field(ge=0)]

MAGIC = b"CCKV"
VERSION = 1
"""Raised whenever the layout changes, so that old shards become misses."""
ALIGNMENT = 64

_PREAMBLE = struct.Struct("<4sHBx")
_LENGTH = struct.Struct("<I")
PREAMBLE_BYTES = _PREAMBLE.size


class TensorEntry(BaseModel):
    """Name, dtype and shape of one stored tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DTypeName
    shape: tuple[_Count, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, uncompressed."""
        return math.prod(self.shape) * self.itemsize


class ShardHeader(BaseModel):
    """All of a shard but its tensors.

    Attributes:
        namespace, chunk, context: The entry's key.
        entry: Digest over all shards' tensors: shards of two versions of an entry don't mix.
        shard: Number of this shard, from 0.
        num_shards: Shards of the entry.
        token_ids: Token ids of this shard.
        base: Position of the shard's first token when the keys were rotated.
        precision: How keys and values are packed.
        dtype: Their dtype before packing.
        key_dim: Channels per head of the keys.
        value_dim: Channels per head of the values.
        compression: How the tensors are compressed.
        tensors: What is stored, in this order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str
    chunk: str
    context: str
    entry: str
    shard: _Count
    num_shards: _Count
    token_ids: tuple[int, ...]
    base: int
    precision: Precision
    dtype: DTypeName
    key_dim: _Count
    value_dim: _Count
    compression: Compression
    tensors: tuple[TensorEntry, ...]


def dtype_of(name: DTypeName) -> torch.dtype:
    """The dtype of this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, not necessarily one that the format knows."""
    return str(dtype).removeprefix("torch.")


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """Entries of a header for these tensors.

    Raises:
        ValueError: A dtype that the format doesn't know.
    """
    return tuple(
        TensorEntry.model_validate({"name": name, "dtype": dtype_name(tensor.dtype), "shape": tuple(tensor.shape)})
        for name, tensor in tensors.items()
    )


def write_preamble(encrypted: bool) -> bytes:
    """First bytes of a shard."""
    return _PREAMBLE.pack(MAGIC, VERSION, encrypted)


def read_preamble(shard: memoryview) -> bool:
    """Whether a shard is encrypted.

    Raises:
        CorruptEntryError: This is no shard, or one of another version.
    """
    if len(shard) < _PREAMBLE.size:
        raise CorruptEntryError(f"truncated: {len(shard)} bytes, fewer than the preamble has")
    magic, version, encrypted = _PREAMBLE.unpack(shard[: _PREAMBLE.size])
    if magic != MAGIC:
        raise CorruptEntryError(f"begins with {magic!r}, not {MAGIC!r}: no entry of this store")
    if version != VERSION:
        raise CorruptEntryError(f"of format version {version}, this release reads version {VERSION}")
    if encrypted > 1:
        raise CorruptEntryError(f"encryption {encrypted} is neither 0 nor 1")
    return bool(encrypted)


def write_body(header: ShardHeader, tensors: Mapping[str, torch.Tensor], level: int) -> bytes:
    """A shard's body; ``tensors`` are those of ``header.tensors``, ``level`` is that of zstd."""
    text = json.dumps(header.model_dump(), separators=(",", ":")).encode()
    pieces: list[bytes | memoryview] = [_LENGTH.pack(len(text)), text]
    at = PREAMBLE_BYTES + _LENGTH.size + len(text)
    if header.compression == "zstd":
        parts = [(tensor_bytes(tensors[entry.name]), entry.itemsize) for entry in header.tensors]
        pieces += [bytes(-at % ALIGNMENT), compress(parts, level)]
    else:
        for entry in header.tensors:
            pieces += [bytes(-at % ALIGNMENT), tensor_bytes(tensors[entry.name])]
            at += len(pieces[-2]) + entry.nbytes
    return b"".join(pieces)


def read_body(body: memoryview) -> tuple[ShardHeader, dict[str, torch.Tensor]]:
    """Header and tensors of a body that is known to be whole.

    Returns:
        The header, and tensors on the CPU that share no memory with ``body``.

    Raises:
        CorruptEntryError: The body isn't what this version writes.
    """
    try:
        (length,) = _LENGTH.unpack(body[: _LENGTH.size])
        end = _LENGTH.size + length
        header = ShardHeader.model_validate(json.loads(bytes(body[_LENGTH.size : end])))
        at = end + -(PREAMBLE_BYTES + end) % ALIGNMENT
        if header.compression == "zstd":
            arrays = decompress(body[at:], [(entry.nbytes, entry.itemsize) for entry in header.tensors])
        else:
            arrays = [np.frombuffer(body[at:to], np.uint8).copy() for at, to in _offsets(header.tensors, end)]
        tensors = {
            entry.name: torch.from_numpy(array).view(dtype_of(entry.dtype)).reshape(entry.shape)
            for entry, array in zip(header.tensors, arrays, strict=True)
        }
    except (ValueError, RuntimeError, struct.error, OverflowError, RecursionError) as error:
        raise CorruptEntryError(f"not readable: {error}") from error
    return header, tensors


def _offsets(entries: Sequence[TensorEntry], at: int) -> Iterator[tuple[int, int]]:
    """Where each uncompressed tensor begins and ends in the body; ``at`` is where the header ends."""
    for entry in entries:
        at += -(PREAMBLE_BYTES + at) % ALIGNMENT
        yield at, at + entry.nbytes
        at += entry.nbytes
