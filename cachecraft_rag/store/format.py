"""Layout of one stored shard: what stands where in its bytes, so that a layer can be read and checked on its own.

    preamble    magic "CCKV", version (2 bytes), 1 when encrypted, one zero byte
    length      bytes of the header block (4 bytes)
    header      length of the JSON (4 bytes), header (JSON), sensitivity of all layers, inter-attention, zeros; sealed
    blocks      one per layer, in order, without gaps: that layer's slice of every tensor; each sealed on its own

Numbers are little-endian. How a block is sealed says ``crypto``; what it is sealed with (its ``place``) is all that
precedes it for the header, and version, entry, shard and layer for the others, so that none passes for another.
Uncompressed slices stand in the order of the header, each from a multiple of 64 of its block on, and unless they are
encrypted the blocks stand at multiples of 64 too, so that they can be mapped into memory by a reader that compares the
checksums itself. Compressed slices are one zstd frame per layer (see ``compression``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import tensor_bytes
from cachecraft_rag.store.compression import compress, decompress
from cachecraft_rag.store.crypto import CHECKSUM_BYTES
from cachecraft_rag.store_config import Compression, Precision

DTypeName = Literal["float64", "float32", "float16", "bfloat16", "int8", "uint8"]
_Count = Annotated[int, Field(ge=0)]

MAGIC = b"CCKV"
VERSION = 2
"""Raised whenever the layout or the meaning of a tensor changes, so that old shards become misses."""
ALIGNMENT = 64

_PREAMBLE = struct.Struct("<4sHBx")
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<HII")
START_BYTES = _PREAMBLE.size + _LENGTH.size
"""Bytes of preamble and length: where the header block begins."""


class TensorEntry(BaseModel):
    """Name, dtype and shape of a stored tensor."""

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

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
        """The entry of a tensor.

        Raises:
            ValueError: A dtype that the format doesn't know.
        """
        return cls.model_validate({"name": name, "dtype": dtype_name(dtype), "shape": shape})

    def tensor(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> torch.Tensor:
        """A view of these bytes as the tensor."""
        return torch.from_numpy(data).view(dtype_of(self.dtype)).reshape(self.shape)


class ShardHeader(BaseModel):
    """All of a shard but its tensors.

    Attributes:
        namespace, chunk, context: The entry's key.
        entry: Digest over all shards' tensors: blocks of two versions of an entry don't mix.
        shard: Number of this shard, from 0.
        num_shards: Shards of the entry.
        token_ids: Token ids of this shard.
        base: Position of the shard's first token when the keys were rotated.
        precision: How keys and values are packed.
        was_lossy: Whether they were held in fewer bits before.
        dtype: Their dtype before packing.
        key_dim: Channels per head of the keys.
        value_dim: Channels per head of the values.
        compression: How the blocks are compressed.
        tensors: One layer's slice of each tensor that a block holds, in this order.
        sensitivity: The sensitivity of all layers; ``None`` when it wasn't measured.
        variant: What the entry was made behind, as ``VariantInfo.to_json`` has it; ``None`` when that wasn't recorded.
        inter_attention: The attention recorded with it, of this shard's tokens.
        blocks: Bytes of each layer's block, sealed.
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
    was_lossy: bool
    dtype: DTypeName
    key_dim: _Count
    value_dim: _Count
    compression: Compression
    tensors: tuple[TensorEntry, ...]
    sensitivity: TensorEntry | None
    variant: str | None = None
    inter_attention: TensorEntry | None = None
    blocks: Annotated[tuple[_Count, ...], Field(min_length=1)]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)


def dtype_of(name: DTypeName) -> torch.dtype:
    """The dtype of this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, not necessarily one that the format knows."""
    return str(dtype).removeprefix("torch.")


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


def write_length(header_bytes: int) -> bytes:
    """What follows the preamble: bytes of the header block, sealed."""
    return _LENGTH.pack(header_bytes)


def read_length(start: memoryview) -> int:
    """Bytes of the header block, from the first ``START_BYTES`` of a shard.

    Raises:
        CorruptEntryError: There are fewer.
    """
    if len(start) < START_BYTES:
        raise CorruptEntryError(f"truncated: {len(start)} bytes hold no length of a header")
    (length,) = _LENGTH.unpack(start[_PREAMBLE.size : START_BYTES])
    assert isinstance(length, int)
    return length


def write_header(header: ShardHeader, sensitivity: torch.Tensor | None, inter_attention: torch.Tensor | None) -> bytes:
    """Content of the header block; the tensors are those that the header names."""
    text = json.dumps(header.model_dump(), separators=(",", ":")).encode()
    tensors = (tensor for tensor in (sensitivity, inter_attention) if tensor is not None)
    content = b"".join((_LENGTH.pack(len(text)), text, *(tensor_bytes(tensor) for tensor in tensors)))
    return content + bytes(-(START_BYTES + len(content) + CHECKSUM_BYTES) % ALIGNMENT)


def read_header(content: memoryview) -> tuple[ShardHeader, torch.Tensor | None, torch.Tensor | None]:
    """Header, sensitivity and inter-attention, from the content of a header block that is known to be whole.

    Raises:
        CorruptEntryError: It isn't what this version writes.
    """
    try:
        (length,) = _LENGTH.unpack(content[: _LENGTH.size])
        at = _LENGTH.size + length
        header = ShardHeader.model_validate(json.loads(bytes(content[_LENGTH.size : at])))
        tensors: list[torch.Tensor | None] = []
        for entry in (header.sensitivity, header.inter_attention):
            length = 0 if entry is None else entry.nbytes
            data = np.frombuffer(content[at : at + length], np.uint8).copy()
            tensors.append(None if entry is None else entry.tensor(data))
            at += length
        return header, tensors[0], tensors[1]
    except (ValueError, RuntimeError, struct.error, OverflowError, RecursionError) as error:
        raise CorruptEntryError(f"header not readable: {error}") from error


def write_block(tensors: Mapping[str, torch.Tensor], compression: Compression, level: int) -> bytes:
    """Content of a layer's block: its slice of every tensor; ``level`` is that of zstd."""
    if compression == "zstd":
        return compress([(tensor_bytes(tensor), tensor.dtype.itemsize) for tensor in tensors.values()], level)
    pieces: list[bytes | memoryview] = []
    for tensor in tensors.values():
        pieces += [tensor_bytes(tensor), bytes(-tensor.nbytes % ALIGNMENT)]
    return b"".join((*pieces, bytes(ALIGNMENT - CHECKSUM_BYTES)))  # so that the next block is aligned, too


def read_block(header: ShardHeader, content: memoryview) -> dict[str, torch.Tensor]:
    """A layer's slice of every tensor, from the content of a block that is known to be whole.

    No arithmetic of torch: it would take cores from a forward pass that runs beside.

    Returns:
        Tensors on the CPU; they share memory with ``content`` where that may be written to.

    Raises:
        CorruptEntryError: It isn't what the header says.
    """
    try:
        if header.compression == "zstd":
            arrays = decompress(content, [(entry.nbytes, entry.itemsize) for entry in header.tensors])
            return {entry.name: entry.tensor(data) for entry, data in zip(header.tensors, arrays, strict=True)}
        data = np.frombuffer(content, np.uint8)
        if not data.flags.writeable:
            data = data.copy()
        found, at = {}, 0
        for entry in header.tensors:
            found[entry.name] = entry.tensor(data[at : at + entry.nbytes])
            at += entry.nbytes + -entry.nbytes % ALIGNMENT
        return found
    except (ValueError, RuntimeError, OverflowError) as error:
        raise CorruptEntryError(f"block not readable: {error}") from error


def block_place(entry: str, shard: int, layer_idx: int) -> bytes:
    """What a layer's block is sealed with."""
    return _PLACE.pack(VERSION, shard, layer_idx) + entry.encode()
