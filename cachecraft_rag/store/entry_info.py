"""What a tier knows of an entry without reading it."""

from __future__ import annotations

from dataclasses import dataclass

from cachecraft_rag.keys import ChunkKey


@dataclass(frozen=True)
class EntryInfo:
    """One entry of one tier.

    Attributes:
        key: Its key.
        tier: Name of the tier.
        nbytes: Bytes it takes there.
        used_at: When it was last used or written, in seconds: Unix time on disk and remote, where it is the server's;
            in memory whatever the tier's clock says, by default a monotonic one.
        tokens: Tokens that a reuse of it saves: all of its own, less the share that was given as ``cfo``. ``None`` on
            remote, which knows it only by reading the entry.
        static: Whether it never expires. On remote this holds for every entry written without a time to live.
        pinned: Whether this process keeps it from being evicted.
    """

    key: ChunkKey
    tier: str
    nbytes: int
    used_at: float
    tokens: int | None
    static: bool
    pinned: bool
