"""From settings to a store."""

from __future__ import annotations

import torch

from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.crypto import load_master_key
from cachecraft_rag.store.disk import DiskStore
from cachecraft_rag.store.memory import MemoryStore
from cachecraft_rag.store.redis import RedisStore
from cachecraft_rag.store.tiered import TieredStore
from cachecraft_rag.store_config import MemoryTierConfig, StoreConfig

_GPU_SHARE = 0.2  # of a GPU's memory, where no budget was given


def open_store(config: StoreConfig, device: torch.device | None = None) -> ChunkStore:
    """Open the tiers that are configured; one tier alone needs nothing around it.

    A folder or server that can't be used is no error here: its tier answers with misses and says so once.

    Args:
        config: The tiers.
        device: The model's device, where hot and warm entries are held; ``None`` is the CPU.

    Raises:
        ValueError: The master key can't be read, or a URL can't be used.
    """
    device = torch.device("cpu") if device is None else device
    hot_bytes, warm_bytes = device_budgets(config, device)
    tiers: list[ChunkStore] = []
    if hot_bytes:
        tiers.append(_memory("hot", hot_bytes, config.hot, device, pins_static=True))
    if warm_bytes:
        tiers.append(_memory("warm", warm_bytes, config.warm, device))
    if config.cold.size or not tiers:
        pin_memory = device.type == "cuda"
        tiers.append(_memory("cold", config.cold.size, config.cold, torch.device("cpu"), pin_memory=pin_memory))
    master_key = None if config.master_key is None else load_master_key(config.master_key)
    if config.disk is not None and config.disk.size:
        disk = config.disk
        codec = EntryCodec(disk.precision, disk.compression, master_key=master_key)
        tiers.append(DiskStore(disk.path, disk.size, codec, disk.policy, disk.ttl_s))
    if config.remote is not None and config.remote.size != 0:
        remote = config.remote
        codec = EntryCodec(remote.precision, remote.compression, master_key=master_key)
        tiers.append(RedisStore(remote.url, codec, remote.ttl_s, remote.size))
    if len(tiers) == 1:
        return tiers[0]
    return TieredStore(
        tiers,
        admit_after=config.admit_after,
        hot_after=config.hot_after if hot_bytes else 1,
        load_ahead=config.load_ahead,
        compute_if_faster=config.compute_if_faster,
    )


def device_budgets(config: StoreConfig, device: torch.device) -> tuple[int, int]:
    """Bytes of the hot and of the warm tier."""
    total = config.device_size
    if total is None:
        total = int(_GPU_SHARE * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
    hot, warm = config.hot.size, config.warm.size
    if hot is None:
        hot = int(total * config.hot_share) if warm is None else max(total - warm, 0)
    return hot, max(total - hot, 0) if warm is None else warm


def _memory(
    name: str,
    nbytes: int,
    config: MemoryTierConfig,
    device: torch.device,
    pin_memory: bool = False,
    pins_static: bool = False,
) -> MemoryStore:
    return MemoryStore(
        nbytes,
        name=name,
        policy=config.policy,
        precision=config.precision,
        ttl_s=config.ttl_s,
        demote_after_s=config.demote_after_s,
        device=device,
        pin_memory=pin_memory,
        pins_static=pins_static,
    )
