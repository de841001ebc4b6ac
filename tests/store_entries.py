"""Keys and entries for tests of the store."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey, digest
from cachecraft_rag.store import ChunkStore, EntryCodec


def key(chunk: str, context: str = "c", namespace: str = "default") -> ChunkKey:
    """A key as the engine makes them."""
    return ChunkKey(namespace, digest(namespace, chunk), digest(context))


def entry(num_tokens: int = 16, of: ChunkKey | None = None, version: int = 0) -> ChunkKV:
    """An entry whose numbers tell whose it is; 32 numbers per token in each of keys and values."""
    seed = zlib.crc32(f"{of} {version}".encode())
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, num_tokens, 8, generator=draw) for _ in range(2))
    sensitivity = torch.rand(2, num_tokens, generator=draw).to(torch.float16)
    token_ids = tuple(torch.randint(0, 30_000, (num_tokens,), generator=draw).tolist())
    return ChunkKV(keys, values, token_ids, seed % 100, sensitivity)


def is_same(one: ChunkKV | None, other: ChunkKV | None) -> bool:
    """Whether two entries are equal in every number."""
    if one is None or other is None:
        return one is other
    if one.sensitivity is None or other.sensitivity is None:
        return False
    return (
        (one.token_ids, one.base) == (other.token_ids, other.base)
        and torch.equal(one.keys, other.keys)
        and torch.equal(one.values, other.values)
        and torch.equal(one.sensitivity, other.sensitivity)
    )


def held(store: ChunkStore, *chunks: str) -> list[str]:
    """Which of these chunks a store has."""
    return [chunk for chunk in chunks if store.contains(key(chunk))]


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


ENTRY_BYTES = sum(len(shard) for shard in EntryCodec().encode(key("a"), entry()))
"""Bytes of an entry of 16 tokens on a disk or in Redis."""


def real_bytes(path: Path) -> int:
    """Bytes of all files, whatever a store says."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def shards(path: Path) -> list[Path]:
    """Files of all shards below a path."""
    return sorted(path.rglob("*.kv"))
