"""Finds the stored KV of a request's chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.variant_choice import Variants


class LookUp:
    """Chooses among the entries that would do for a chunk, and takes what is there.

    An entry whose token ids differ (a hash collision) is removed and counts as missing.

    Args:
        store: Where the entries are.
        variants: Which of them were made behind what.
    """

    def __init__(self, store: ChunkStore, variants: Variants) -> None:
        self._store, self._variants = store, variants

    def find(self, chunks: Sequence[RequestChunk], lazily: bool = True, alpha: float | None = None) -> None:
        """Fill in what is found: exact before canonical KV, or by lowest CFO; a chunk's own before its whole chunk's.

        Args:
            chunks: The chunks of a request.
            lazily: Whether entries of slow tiers may be read later, and left where computing is quicker.
            alpha: Strength of the correction, to choose among all variants; ``None`` for exact and canonical ones.
        """
        find = partial(self._find if lazily else self._load, alpha)
        readers = self._store.readers if lazily else None
        # Slow tiers are asked for several chunks at the same time.
        list(map(find, chunks) if readers is None else readers.map(find, chunks))

    def find_exact(self, chunks: Sequence[RequestChunk]) -> None:
        """Fill in the KV of those chunks for which it is exact, read in full."""
        for chunk in chunks:
            found = self._store.get_with_tier(chunk.exact_key)
            if found is not None and self._take(chunk, chunk.exact_key, None, *found) and not chunk.is_exact:
                chunk.chunk_kv = None

    def _usable(self, chunk: RequestChunk, alpha: float | None) -> Iterator[tuple[ChunkKey, float | None]]:
        """Keys of the entries that would do for a chunk, the best first, and their CFO."""
        canonical, whole = chunk.key, chunk.whole
        if alpha is None:
            keys = (*chunk.exact_keys, canonical, *(() if whole is None else (whole.key,)))
            yield from ((key, None) for key in dict.fromkeys(keys))
            return
        how = (canonical.context, chunk.prefix, len(chunk.token_ids), alpha)
        yield from self._variants.ranked(chunk.exact_key, *how)
        if whole is not None:  # what was recorded is of another number of tokens, so only KV without a record is ranked
            yield from self._variants.ranked(whole.exact_key if whole.start == 0 else whole.key, *how)

    def _find(self, alpha: float | None, chunk: RequestChunk) -> None:
        for key, cfo in self._usable(chunk, alpha):
            found = self._store.find(key)
            if found is None:
                continue
            if found.kv is None:
                chunk.is_declined = True
            elif self._take(chunk, key, cfo, found.kv, found.tier):
                return

    def _load(self, alpha: float | None, chunk: RequestChunk) -> None:
        for key, cfo in self._usable(chunk, alpha):
            found = self._store.get_with_tier(key)
            if found is not None and self._take(chunk, key, cfo, *found):
                return

    def _take(self, chunk: RequestChunk, key: ChunkKey, cfo: float | None, kv: LayeredKV, tier: str) -> bool:
        """Use an entry for a chunk, unless it holds other tokens: then the entry goes."""
        part = chunk.part_of(key, kv)
        if part is None:
            self._store.remove(key)
            return False
        chunk.key, chunk.chunk_kv, chunk.tier, chunk.is_declined = key, part, tier, False
        if cfo is not None:
            chunk.cfo = cfo
            self._variants.used(key, cfo)
        return True
