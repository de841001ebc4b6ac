"""One stored shard: at most 1024 tokens of an entry, written at once, read layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.crypto import ChecksumSeal, CipherSeal, Seal
from cachecraft_rag.store.format import (
    START_BYTES,
    ShardHeader,
    TensorEntry,
    block_place,
    dtype_name,
    dtype_of,
    read_block,
    read_header,
    read_length,
    read_preamble,
    write_block,
    write_header,
    write_length,
    write_preamble,
)
from cachecraft_rag.store.precision import PackedKV
from cachecraft_rag.store.readers import ShardReader
from cachecraft_rag.store_config import Compression
from cachecraft_rag.variants import VariantInfo


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard whose header was read and verified. Threads may read different layers at once.

    Attributes:
        header: Its header.
        shape: What it holds, without the numbers: a ``PackedKV`` on the meta device, but with the real sensitivity and
            inter-attention.
        reader: Where its bytes come from.
        seal: How its blocks are sealed.
        offsets: Where each layer's block begins.
    """

    header: ShardHeader
    shape: PackedKV
    reader: ShardReader
    seal: Seal
    offsets: tuple[int, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """What all shards of an entry have in common."""
        shape = self.shape
        heads = shape.parts["keys"].shape[1]
        recorded = shape.sensitivity is not None, shape.inter_attention is not None, shape.variant
        return shape.num_layers, heads, shape.key_dim, shape.value_dim, shape.dtype, *recorded

    def read(self, layer_idx: int) -> PackedKV:
        """A ``PackedKV`` of one layer, read and verified.

        Raises:
            CorruptEntryError: The block is damaged, cut off, or of another layer, shard or entry.
            OSError: The medium refuses.
        """
        length = self.header.blocks[layer_idx]
        sealed = self.reader.read_at(self.offsets[layer_idx], length)
        if len(sealed) < length:
            raise CorruptEntryError(f"truncated: {len(sealed)} of {length} bytes of layer {layer_idx} are there")
        place = block_place(self.header.entry, self.header.shard, layer_idx)
        slices = read_block(self.header, self.seal.open(sealed, place))
        parts = {name: part[None] for name, part in slices.items()}
        shape = self.shape
        return PackedKV(
            shape.precision,
            shape.dtype,
            shape.key_dim,
            shape.value_dim,
            shape.token_ids,
            shape.base,
            parts,
            shape.was_lossy,
        )


def open_shard(key: ChunkKey, reader: ShardReader, master_key: bytes | None) -> Shard:
    """Read and verify the header of a shard.

    Raises:
        CorruptEntryError: It is damaged, cut off or too long, of another version, or encrypted when it must not be or
            the other way round.
        OSError: The medium refuses.
    """
    start = reader.read_at(0, START_BYTES)
    is_encrypted = read_preamble(start)
    if is_encrypted and master_key is None:
        raise CorruptEntryError("encrypted, but this store has no master key")
    if not is_encrypted and master_key is not None:
        raise CorruptEntryError("not encrypted, but this store has a master key")
    length = read_length(start)
    end = START_BYTES + length
    if end > reader.size:
        raise CorruptEntryError(f"truncated: {reader.size} bytes, and the header alone ends at {end}")
    seal = make_seal(key, master_key)
    header, *measured = read_header(seal.open(reader.read_at(START_BYTES, length), bytes(start)))
    *offsets, total = accumulate(header.blocks, initial=end)
    if total != reader.size:
        raise CorruptEntryError(f"{reader.size} bytes instead of {total}: truncated, or something was added")
    return Shard(header, _shape(header, *measured), reader, seal, tuple(offsets))


def write_shard(
    key: ChunkKey,
    entry: str,
    index: int,
    num_shards: int,
    packed: PackedKV,
    compression: Compression,
    level: int,
    master_key: bytes | None,
) -> bytes:
    """The bytes of a shard.

    Args:
        key: The entry's key.
        entry: Digest of the entry.
        index: Number of the shard, from 0.
        num_shards: Shards of the entry.
        packed: What it holds, on the CPU.
        compression: How blocks are compressed.
        level: Level of zstd.
        master_key: What to encrypt with; ``None`` doesn't.

    Raises:
        ValueError: A dtype that the format doesn't know.
    """
    seal = make_seal(key, master_key)
    tensors = {name: part for name, part in packed.parts.items() if name != "sensitivity"}
    blocks = []
    for layer_idx in range(packed.num_layers):
        slices = {name: part[layer_idx] for name, part in tensors.items()}
        blocks.append(seal.close(write_block(slices, compression, level), block_place(entry, index, layer_idx)))
    measured = {"sensitivity": packed.sensitivity, "inter_attention": packed.inter_attention}
    fields = {
        "namespace": key.namespace,
        "chunk": key.chunk,
        "context": key.context,
        "entry": entry,
        "shard": index,
        "num_shards": num_shards,
        "token_ids": packed.token_ids,
        "base": packed.base,
        "precision": packed.precision,
        "was_lossy": packed.was_lossy,
        "dtype": dtype_name(packed.dtype),
        "key_dim": packed.key_dim,
        "value_dim": packed.value_dim,
        "compression": compression,
        "tensors": tuple(TensorEntry.of(name, part.dtype, tuple(part.shape[1:])) for name, part in tensors.items()),
        "variant": None if packed.variant is None else packed.variant.to_json().decode(),
        "blocks": tuple(len(block) for block in blocks),
        **{name: None if t is None else TensorEntry.of(name, t.dtype, tuple(t.shape)) for name, t in measured.items()},
    }
    content = write_header(ShardHeader.model_validate(fields), *measured.values())
    start = write_preamble(master_key is not None) + write_length(len(content) + seal.overhead)
    return b"".join((start, seal.close(content, start), *blocks))


def make_seal(key: ChunkKey, master_key: bytes | None) -> Seal:
    """How the blocks of an entry are sealed."""
    return ChecksumSeal() if master_key is None else CipherSeal(master_key, key)


def _shape(header: ShardHeader, sensitivity: torch.Tensor | None, inter_attention: torch.Tensor | None) -> PackedKV:
    names = [entry.name for entry in header.tensors]
    if len({*names, "sensitivity"}) != len(names) + 1:
        raise CorruptEntryError(f"header names tensors twice: {', '.join(names)}")
    try:
        parts = {
            entry.name: torch.empty((header.num_layers, *entry.shape), dtype=dtype_of(entry.dtype), device="meta")
            for entry in header.tensors
        }
        if sensitivity is not None:
            parts["sensitivity"] = sensitivity
        dims = header.key_dim, header.value_dim
        variant = None if header.variant is None else VariantInfo.from_json(header.variant)
        return PackedKV(
            header.precision,
            dtype_of(header.dtype),
            *dims,
            header.token_ids,
            header.base,
            parts,
            header.was_lossy,
            variant,
            inter_attention,
        )
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        raise CorruptEntryError(f"header and tensors disagree: {error}") from error
