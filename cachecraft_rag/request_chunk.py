"""A chunk of one request: what is looked for, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.keys import ChunkKey, KeyMaker, context_hash
from cachecraft_rag.piece_kv import PieceKV
from cachecraft_rag.plan import RequestPlan, make_plan
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.variants import Prefix


@dataclass(frozen=True)
class WholeChunk:
    """The chunk that a chunk of a request is a piece of; its entries hold KV of the piece, too.

    Attributes:
        token_ids: Ids of the whole.
        start: Number of the piece's first token in it.
        exact_key: Key of its KV behind exactly the tokens that precede the piece in the request.
        key: Key of its KV behind the canonical prefix.
    """

    token_ids: tuple[int, ...]
    start: int
    exact_key: ChunkKey
    key: ChunkKey

    @property
    def exact_keys(self) -> tuple[ChunkKey, ...]:
        """Keys of entries that are exact for the piece: only a piece that begins the chunk has the same before it."""
        return (self.exact_key,) if self.start == 0 else ()


@dataclass(eq=False)
class RequestChunk:
    """A chunk of a request, or a piece of one, which is a chunk of its own wherever it is computed and stored.

    Attributes:
        token_ids: Its ids.
        exact_key: Key of its KV behind exactly the tokens that precede it in this request.
        key: Key of the entry that is used: the exact one, or the one behind the canonical prefix; of a piece, perhaps
            that of its whole chunk.
        chunk_kv: The KV that is used, perhaps still to be read; ``None`` until it is found or computed.
        tier: Name of the tier it was found in; ``None`` when it was not stored.
        is_declined: Whether it was left there because computing it is quicker.
        preceding: ``ChunkKey.chunk`` of the chunks before it.
        cfo: Share of its tokens to recompute, where variants are chosen by it.
        whole: What it is a piece of; ``None`` for a whole chunk.
        since: ``Forgetting.count`` of its namespace when it was looked for.
        model: Fingerprint of the model that its keys name.
    """

    token_ids: tuple[int, ...]
    exact_key: ChunkKey
    key: ChunkKey
    chunk_kv: LayeredKV | None = None
    tier: str | None = None
    is_declined: bool = False
    preceding: tuple[str, ...] = ()
    cfo: float | None = None
    whole: WholeChunk | None = None
    since: int = 0
    model: str = ""

    @property
    def prefix(self) -> Prefix:
        """What stands before it."""
        return Prefix(self.preceding, self.exact_key.context)

    @property
    def exact_keys(self) -> tuple[ChunkKey, ...]:
        """Keys of entries computed behind the tokens that precede it here: its own, and its whole chunk's."""
        return (self.exact_key, *(() if self.whole is None else self.whole.exact_keys))

    @property
    def entry(self) -> LayeredKV | None:
        """The KV that is used, as it is stored under ``key``: of a piece, perhaps that of its whole chunk."""
        return self.chunk_kv.whole if isinstance(self.chunk_kv, PieceKV) else self.chunk_kv

    @property
    def is_exact(self) -> bool:
        """Whether the KV that is used, to the last bit, is what the tokens before it here would give."""
        entry = self.entry
        if self.key not in self.exact_keys or entry is None:
            return self.key in self.exact_keys
        return not entry.is_lossy and (entry.variant is None or entry.variant.is_exact)

    def part_of(self, key: ChunkKey, kv: LayeredKV) -> LayeredKV | None:
        """The KV of this chunk in an entry; ``None`` when that holds other tokens than its key says."""
        if self.whole is None or key.chunk != self.whole.key.chunk:
            return kv if kv.matches(self.token_ids) else None
        start = self.whole.start
        return PieceKV(kv, start, start + len(self.token_ids)) if kv.matches(self.whole.token_ids) else None


def request_chunks(
    encoded: EncodedPrompt, keys: KeyMaker, canonical: str, cfo: float | None, since: int
) -> list[RequestChunk]:
    """The chunks of a prompt before anything is looked up.

    Args:
        encoded: The prompt.
        keys: Keys of its namespace.
        canonical: ``ChunkKey.context`` of what is computed alone.
        cfo: CFO of what is not found.
        since: ``Forgetting.count`` of the namespace.
    """
    token_ids = np.asarray(encoded.token_ids, dtype=np.int32)
    chunks: list[RequestChunk] = []
    for span in encoded.spans:
        ids = encoded.token_ids[span.start : span.end]
        context, whole = context_hash(token_ids[: span.start]), None
        if span.piece is not None:
            names = [keys.key(span.piece.token_ids, behind) for behind in (context, canonical)]
            whole = WholeChunk(span.piece.token_ids, span.piece.start, *names)
        exact_key, key = (keys.key(ids, behind) for behind in (context, canonical))
        preceding = tuple(chunk.exact_key.chunk for chunk in chunks)
        chunks.append(
            RequestChunk(ids, exact_key, key, preceding=preceding, cfo=cfo, whole=whole, since=since, model=keys.model)
        )
    return chunks


def plan_request(
    encoded: EncodedPrompt, chunks: Sequence[RequestChunk], ratio: float, head: LayeredKV | None
) -> RequestPlan:
    """What happens to the chunks of a prompt once they are looked up; see ``make_plan``.

    Args:
        encoded: The prompt.
        chunks: Its chunks, with what was found of them.
        ratio: Share of the approximate chunk tokens to recompute.
        head: Exact KV of what it begins with, where that is stored.
    """
    spans = [(span.start, span.end) for span in encoded.spans]
    stored = [chunk.chunk_kv is not None for chunk in chunks]
    exact = [chunk.is_exact for chunk in chunks]
    cfos = [chunk.cfo for chunk in chunks]
    num_head_tokens = 0 if head is None else head.num_tokens
    return make_plan(len(encoded.token_ids), spans, stored, exact, ratio, cfos, num_head_tokens)
