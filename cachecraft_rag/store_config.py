"""Settings of the store's tiers: frozen models, every field with a default, unknown options refused."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Precision = Literal["model", "k16v8", "int8", "int4"]
Compression = Literal["none", "zstd"]
EvictionPolicyName = Literal["lru", "lfu", "saving"]
MAX_TTL_S = 10**12  #: Redis keeps milliseconds in 64 bits.

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(value: object) -> object:
    """Turn a size such as ``"4GiB"`` or ``"500 MB"`` into bytes; other values pass through to pydantic.

    Raises:
        ValueError: The text is not a number with one of the known units.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; use bytes or a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


class Settings(BaseModel):
    """Settings that can't be changed once made, and that refuse names they don't know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MemoryTierConfig(Settings):
    """A tier in memory.

    Attributes:
        size: Byte budget; an integer or text such as ``"4GiB"``.
        policy: Which entries go first when it is full: least recently used, least frequently used (aged), or those
            that save least computation per byte.
        precision: What entries are kept in; everything but ``"model"`` loses some accuracy.
        ttl_s: Seconds without use after which an entry is gone; ``None`` keeps it.
        demote_after_s: Seconds without use after which an entry is lowered to int4 when room is short, before others
            are dropped; ``None`` never lowers.
    """

    size: ByteSize = 4 * 2**30
    policy: EvictionPolicyName = "lru"
    precision: Precision = "model"
    ttl_s: float | None = Field(default=None, gt=0)
    demote_after_s: float | None = Field(default=None, gt=0)


class WarmTierConfig(MemoryTierConfig):
    """A tier in device memory.

    Attributes:
        size: Byte budget; ``None`` takes what it is left of ``StoreConfig.device_size``.
    """

    size: ByteSize | None = None  # type: ignore[assignment]


class HotTierConfig(WarmTierConfig):
    """The tier of what is used most.

    Attributes:
        policy: As in every memory tier.
    """

    policy: EvictionPolicyName = "lfu"


class DiskTierConfig(Settings):
    """A tier of files that outlives the process and may be shared by several.

    Attributes:
        path: Folder; made when it is missing.
        size: Byte budget over all processes.
        policy: As in memory.
        precision: What entries are written in.
        compression: ``"zstd"`` compresses after sorting bytes by their place in a number.
        ttl_s: Seconds without use after which an entry is gone.
    """

    path: str = Field(min_length=1)
    size: ByteSize = 16 * 2**30
    policy: EvictionPolicyName = "lru"
    precision: Precision = "model"
    compression: Compression = "none"
    ttl_s: float | None = Field(default=None, gt=0)


class RemoteTierConfig(Settings):
    """A tier in Redis or Valkey, shared by many processes and machines.

    Attributes:
        url: ``redis://``, ``rediss://`` (TLS) or ``redis+cluster://``.
        size: Byte budget; ``None`` leaves it to the server.
        precision: What entries are sent in.
        compression: As on disk.
        ttl_s: Seconds without use after which an entry is gone, from a millisecond on; ``None`` keeps it.
    """

    url: str = Field(min_length=1)
    size: ByteSize | None = None
    precision: Precision = "model"
    compression: Compression = "none"
    ttl_s: float | None = Field(default=3600.0, ge=0.001, le=MAX_TTL_S)


class StoreConfig(Settings):
    """The tiers of the chunk store, fastest first; each may be given as a plain dict, and one of 0 bytes is left out.

    Attributes:
        device_size: Byte budget of hot and warm together, in the memory of the model's device, which is host memory
            without a GPU; ``None`` takes a fifth of a GPU's memory, and nothing where there is none. Where one of the
            two has a size of its own, the other has what is left.
        hot_share: Share of ``device_size`` that is hot, where neither has a size of its own.
        hot: Device memory for chunks that are used again and again, and for static ones, which are never pushed out.
        warm: Device memory for what was used last.
        cold: Host memory, pinned where there is a GPU.
        disk: Files; ``None`` for no such tier.
        remote: Redis or Valkey; ``None`` for no such tier.
        master_key: Encrypts disk and remote, with a key of its own for every namespace: bytes, the path of a key file,
            or ``"env:NAME"`` for an environment variable; ``None`` stores entries in the clear.
        admit_after: Uses after which an entry is written to disk and remote; being computed is the first.
        hot_after: Uses after which an entry may become hot.
        load_ahead: Chunks read from disk or remote at the same time, ahead of the layers that compute with them; 0
            loads one after the other, before anything is computed.
        compute_if_faster: Whether a chunk is computed anew where loading it would take longer, both as measured.
    """

    device_size: ByteSize | None = None
    hot_share: float = Field(default=0.30, ge=0.0, le=1.0)
    hot: HotTierConfig = HotTierConfig()
    warm: WarmTierConfig = WarmTierConfig()
    cold: MemoryTierConfig = MemoryTierConfig()
    disk: DiskTierConfig | None = None
    remote: RemoteTierConfig | None = None
    master_key: bytes | str | None = Field(default=None, repr=False)
    admit_after: int = Field(default=1, ge=1)
    hot_after: int = Field(default=2, ge=1)
    load_ahead: int = Field(default=3, ge=0, le=64)
    compute_if_faster: bool = True

    @model_validator(mode="after")
    def _fits_the_device(self) -> StoreConfig:
        hot, warm = self.hot.size or 0, self.warm.size or 0
        if self.device_size is not None and hot + warm > self.device_size:
            raise ValueError(
                f"device_size: {self.device_size} bytes are fewer than hot.size and warm.size, {hot} + {warm} bytes; "
                "give more, or smaller sizes"
            )
        return self
