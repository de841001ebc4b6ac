"""An entry that was pushed out of a tier, on its way to the next."""

from __future__ import annotations

from dataclasses import dataclass

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.precision import PackedKV


@dataclass(frozen=True, eq=False)
class Evicted:
    """What a tier gave up, and what the next one must know of it.

    Attributes:
        key: Its key.
        held: The entry as the tier held it.
        static: Whether it is exempt from any time to live.
        cfo: Share of its tokens that a reuse recomputes.
    """

    key: ChunkKey
    held: ChunkKV | PackedKV
    static: bool
    cfo: float

    def chunk_kv(self) -> ChunkKV:
        """The entry in the model's dtype."""
        return self.held.unpack() if isinstance(self.held, PackedKV) else self.held
