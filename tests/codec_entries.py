"""A key, entries and settings for tests of what is written and read as bytes."""

from __future__ import annotations

from itertools import product

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store_config import Compression

MASTER = bytes(range(32))
KEY = ChunkKey("tenant-of-mine", "0123456789abcdef" * 2, "fedcba9876543210" * 2)
COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")
SETTINGS = list(product(COMPRESSIONS, (None, MASTER)))
SETTING_NAMES = ["plain", "encrypted", "zstd", "zstd-encrypted"]


def entry(
    num_tokens: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 4,
    seed: int = 0,
    num_layers: int = 2,
) -> ChunkKV:
    """Random KV of 2 heads."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_layers, 2, num_tokens, head_dim, generator=draw).to(dtype) for _ in range(2))
    sensitivity = torch.rand(num_layers, num_tokens, generator=draw).to(torch.float16)
    return ChunkKV(keys, values, tuple(range(70_000, 70_000 + num_tokens)), 11, sensitivity)


def assert_same(left: ChunkKV, right: ChunkKV) -> None:
    """Equal in every number, and in the dtypes."""
    for name in ("keys", "values", "sensitivity"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert (left.token_ids, left.base) == (right.token_ids, right.base)
