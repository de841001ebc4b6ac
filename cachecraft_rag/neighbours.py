"""Which chunks of a namespace are most alike: what a chunk's KV is computed behind.

A retriever returns chunks about one matter, so what stands before a chunk in a prompt is more often like it than not,
and KV computed behind chunks like it is nearer to that of the prompt (FusionRAG, arXiv 2601.12904). How alike two are
is the cosine of their TF-IDF vectors over token ids (Salton and Buckley, 1988), so that it works in every language.

Such KV carries traces of the chunks it was computed behind. Which those are is noted beside the documents before it is
stored, so that every process that forgets one of them finds what must go with it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachecraft_rag.forgetting import Forgetting
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.store import ChunkStore

#: Chunks that are remembered, over all namespaces; those used last. With 512 tokens each they take 16 MB.
MAX_CHUNKS = 4096
#: Cosine from which two chunks are taken for forms of one text: a prompt has one of them.
SAME_TEXT = 0.9


class _Counted(NamedTuple):
    token_ids: npt.NDArray[np.int32]
    terms: npt.NDArray[np.int32]  # the distinct ids
    weights: npt.NDArray[np.float32]  # 1 + log of how often each occurs


class Neighbours:
    """The chunks that were used last, by namespace. Thread-safe.

    Args:
        store: Where KV is kept.
        forgetting: Whether a chunk was forgotten meanwhile.
        max_chunks: How many are remembered over all namespaces, the last used; 0 for none.
    """

    def __init__(self, store: ChunkStore, forgetting: Forgetting, max_chunks: int = MAX_CHUNKS) -> None:
        self._store, self._forgetting, self._max_chunks = store, forgetting, max_chunks
        self._known: OrderedDict[tuple[str, str, str], _Counted] = OrderedDict()  # by namespace, model and chunk
        self._lock = threading.Lock()

    def add(self, key: ChunkKey, model: str, token_ids: tuple[int, ...], since: int) -> None:
        """Remember a chunk; one known already becomes the last used.

        Args:
            key: A key of it.
            model: Fingerprint of the model that the key names.
            token_ids: Its ids.
            since: ``Forgetting.count`` when it was given; it is not remembered if something was forgotten since.
        """
        name = key.namespace, model, key.chunk
        if not token_ids or not self._max_chunks:
            return
        counted = self._known.get(name) or _counted(token_ids)
        with self._forgetting.keeping(key.namespace, since) as is_wanted, self._lock:
            if is_wanted:
                self._known[name] = counted
                self._known.move_to_end(name)
            while len(self._known) > self._max_chunks:
                self._known.popitem(last=False)

    def meet(self, chunks: Iterable[RequestChunk]) -> None:
        """Remember the chunks of a request."""
        for chunk in chunks:
            self.add(chunk.exact_key, chunk.model, chunk.token_ids, chunk.since)

    def nearest(
        self, namespace: str, model: str, token_ids: Sequence[int], num_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        """The chunks of a namespace that are most like one, best first: ids by ``ChunkKey.chunk``.

        Args:
            namespace: Whose chunks.
            model: The model that they were remembered for.
            token_ids: Ids of the chunk; it need not be known, and is not its own neighbour.
            num_tokens: How many tokens they are to hold together, no more than half of them counted of one. Fewer where
                no others share a token with it.
        """
        own = _counted(token_ids)
        with self._lock:
            known = [(name[2], one) for name, one in self._known.items() if name[:2] == (namespace, model)]
        known = [(chunk, one) for chunk, one in known if not np.array_equal(one.token_ids, own.token_ids)]
        if not known or not token_ids:
            return {}
        likeness = _cosines(own, [one for _, one in known])
        alike = np.flatnonzero((likeness > 0.0) & (likeness < SAME_TEXT))
        found: dict[str, tuple[int, ...]] = {}
        missing = num_tokens
        for index in alike[np.argsort(-likeness[alike], kind="stable")]:
            if missing <= 0:
                break
            chunk, (ids, *_) = known[index]
            found[chunk] = tuple(ids.tolist())
            missing -= min(ids.size, num_tokens // 2)
        return found

    def note(self, key: ChunkKey, neighbours: Iterable[str]) -> None:
        """Note that an entry is about to be stored that was computed behind these chunks."""
        for chunk in neighbours:
            self._store.documents.add(key.namespace, _name_of(chunk, key.context), [key.chunk])

    def forget(self, namespace: str, chunks: Collection[str], context: str) -> int:
        """Forget chunks for all models, and drop the entries that were computed behind them.

        Args:
            namespace: Whose chunks.
            chunks: Their ``ChunkKey.chunk``, which differs from model to model.
            context: That of entries which are computed behind neighbours.

        Returns:
            How many entries were dropped.
        """
        with self._lock:
            own = [(name, one.token_ids.tobytes()) for name, one in self._known.items() if name[0] == namespace]
            gone = {token_ids for name, token_ids in own if name[2] in chunks}
            for name, token_ids in own:
                if token_ids in gone:
                    del self._known[name]
        num_dropped, documents = 0, self._store.documents
        for chunk in chunks:
            noted = _name_of(chunk, context)
            behind = documents.chunks(namespace, noted)
            documents.remove(namespace, noted)
            num_dropped += sum(self._store.remove(ChunkKey(namespace, one, context)) for one in behind)
        return num_dropped

    def clear(self, namespace: str) -> None:
        """Forget a namespace; the store forgets what was noted."""
        with self._lock:
            for name in [name for name in self._known if name[0] == namespace]:
                del self._known[name]


def _counted(token_ids: Sequence[int]) -> _Counted:
    ids = np.asarray(token_ids, dtype=np.int32)
    terms, counts = np.unique(ids, return_counts=True)
    return _Counted(ids, terms, (1.0 + np.log(counts)).astype(np.float32))


def _cosines(own: _Counted, others: Sequence[_Counted]) -> npt.NDArray[np.float64]:
    """Cosine of a chunk's TF-IDF vector with that of each other, ``[num_others]``; 0 where one has no length.

    Of N chunks, this one included, n have a token: it counts log((1 + N) / n), times 1 + log of how often it occurs.
    """
    terms = np.concatenate([one.terms for one in others])
    having = np.bincount(terms, minlength=int(own.terms.max()) + 1)
    having[own.terms] += 1
    rarity = np.log((2.0 + len(others)) / np.maximum(having, 1))
    mine = np.zeros(having.size)
    mine[own.terms] = own.weights * rarity[own.terms]
    theirs = np.concatenate([one.weights for one in others]) * rarity[terms]
    starts = np.cumsum([0, *(one.terms.size for one in others[:-1])])
    products = np.add.reduceat(theirs * mine[terms], starts)
    norms = np.sqrt(np.add.reduceat(theirs**2, starts)) * np.linalg.norm(mine)
    cosines: npt.NDArray[np.float64] = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0.0)
    return cosines


def _name_of(chunk: str, context: str) -> str:
    """Name under which the chunks computed behind a chunk are kept among the documents."""
    return f"\0alike {chunk} {context}"
