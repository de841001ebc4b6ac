"""A chunk of one request: what is looked for, and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.variants import Prefix


@dataclass(eq=False)
class RequestChunk:
    """A chunk of a request.

    Attributes:
        token_ids: Its ids.
        exact_key: Key of its KV behind exactly the tokens that precede it in this request.
        key: Key of the entry that is used: the exact one, or the one behind the canonical prefix.
        chunk_kv: The KV that is used, perhaps still to be read; ``None`` until it is found or computed.
        tier: Name of the tier it was found in; ``None`` when it was not stored.
        is_declined: Whether it was left there because computing it is quicker.
        preceding: ``ChunkKey.chunk`` of the chunks before it.
        cfo: Share of its tokens to recompute, where variants are chosen by it.
    """

    token_ids: tuple[int, ...]
    exact_key: ChunkKey
    key: ChunkKey
    chunk_kv: LayeredKV | None = None
    tier: str | None = None
    is_declined: bool = False
    preceding: tuple[str, ...] = ()
    cfo: float | None = None

    @property
    def prefix(self) -> Prefix:
        """What stands before it."""
        return Prefix(self.preceding, self.exact_key.context)

    @property
    def is_exact(self) -> bool:
        """Whether the KV that is used, to the last bit, is what the tokens before it here would give."""
        if self.key != self.exact_key or self.chunk_kv is None:
            return self.key == self.exact_key
        variant = self.chunk_kv.variant
        return not self.chunk_kv.is_lossy and (variant is None or variant.is_exact)
