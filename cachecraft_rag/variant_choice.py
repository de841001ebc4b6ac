"""The variants of chunks that a store holds: which one is used behind a prefix, and which are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cachecraft_rag.attention_record import ChunkRecorder
from cachecraft_rag.cfo import cache_fix_overhead
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import RecomputeConfig
from cachecraft_rag.forgetting import Forgetting
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.plan import RequestPlan
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.variants import Prefix, VariantInfo, choose_variant, which_to_drop

_FADING = 0.5  # what the uses of a chunk's variants still count once another has come


@dataclass
class _Known:
    """What is remembered of a stored entry.

    Attributes:
        info: What was recorded; ``None`` when nothing was.
        uses: How often it was used, earlier uses faded; being computed is the first.
    """

    info: VariantInfo | None
    uses: float = 1.0


class Variants:
    """Knows the stored variants of chunks without loading their KV. Thread-safe.

    What an entry was made behind is read once, from its header, and remembered for the chunks that were asked for last.

    Args:
        store: Where the entries are.
        max_chunks: How many chunks are remembered.
    """

    def __init__(self, store: ChunkStore, max_chunks: int) -> None:
        self._store, self._max_chunks = store, max_chunks
        self._chunks: OrderedDict[str, dict[ChunkKey, _Known]] = OrderedDict()
        self._lock = threading.Lock()

    def ranked(
        self, exact: ChunkKey, canonical: str, prefix: Prefix, num_tokens: int, alpha: float
    ) -> Iterator[tuple[ChunkKey, float]]:
        """Stored entries of a chunk that may be used behind a prefix.

        An entry without a record is one that was made alone, or an exact one of another policy: the latter can be used
        as it is behind the same tokens, and nothing is known of it elsewhere.

        Args:
            exact: Key of its KV behind exactly this prefix.
            canonical: Context of KV that was made alone.
            prefix: What stands before it.
            num_tokens: Its length.
            alpha: Strength of the correction.

        Yields:
            Key and CFO, the lowest CFO first.
        """
        candidates = {}
        for key, info in self._infos(exact.chunk).items():
            if info is None and key.context in (exact.context, canonical):
                candidates[key] = VariantInfo.alone(key.context, num_tokens)
            elif info is not None and info.num_tokens == num_tokens and _is_under_its_key(key, info):
                candidates[key] = info
        while (choice := choose_variant(list(candidates.values()), prefix, alpha)) is not None:
            index, cfo = choice
            key = list(candidates)[index]
            del candidates[key]
            yield key, cfo

    def used(self, key: ChunkKey, cfo: float) -> None:
        """Count a use of an entry, unless all of it is computed again."""
        with self._lock:
            known = self._chunks.get(key.chunk, {}).get(key)
            if known is not None and cfo < 1.0:
                known.uses += 1.0

    def note_traces(self, namespace: str, preceding: Mapping[str, Sequence[str]]) -> None:
        """Note which chunks are about to be kept behind which, so that ``remove_behind`` finds them in any process.

        Args:
            namespace: Whose chunks.
            preceding: The preceding chunks of every chunk.
        """
        behind: defaultdict[str, list[str]] = defaultdict(list)
        for chunk, others in preceding.items():
            for other in dict.fromkeys(others):
                behind[other].append(chunk)
        for other, chunks in behind.items():
            self._store.documents.add(namespace, _traces_of(other), chunks)

    def keep(self, key: ChunkKey, chunk_kv: ChunkKV, alpha: float, limit: int) -> bool:
        """Store a variant with its record, and drop the least useful ones of the chunk beyond a limit.

        Entries without a record are not the planner's: they are neither counted nor dropped.

        Returns:
            Whether it was stored and stayed.
        """
        info = chunk_kv.variant
        assert info is not None, "a variant has a record"
        self._infos(key.chunk)
        if not self._store.put(key, chunk_kv, cfo=cache_fix_overhead(alpha, info.cci, 0.0)):
            return False
        with self._lock:
            known = self._chunks.setdefault(key.chunk, {})
            known.pop(key, None)
            for other in known.values():
                other.uses *= _FADING
            known[key] = _Known(info)
            recorded = [(name, one.info, one.uses) for name, one in known.items() if one.info is not None]
            dropped = which_to_drop([info for _, info, _ in recorded], [uses for *_, uses in recorded], limit, alpha)
            doomed = [recorded[index][0] for index in dropped]
        for name in doomed:
            self._store.remove(name)
        return key not in doomed

    def keep_computed(
        self,
        plan: RequestPlan,
        chunks: Sequence[RequestChunk],
        kv: PromptKV,
        recorder: ChunkRecorder,
        recompute: RecomputeConfig,
        forgetting: Forgetting,
    ) -> int:
        """Keep what a request computed exactly in place.

        Args:
            plan: The request's plan.
            chunks: Its chunks.
            kv: Its buffer.
            recorder: What was recorded of ``plan.computed_exactly``.
            recompute: Its settings.
            forgetting: Whether a chunk was forgotten meanwhile.

        Returns:
            Tokens whose KV was stored.
        """
        exact = [(index, plan.chunks[index], chunks[index]) for index in plan.computed_exactly]
        for namespace in {chunk.exact_key.namespace for chunk in chunks}:
            self.note_traces(namespace, {chunk.exact_key.chunk: chunk.preceding for _, _, chunk in exact})
        num_stored = 0
        for index, planned, chunk in exact:
            info, paid = recorder.variant(index, chunk.prefix)
            tensors = kv.slice(planned.start, planned.end)
            made = ChunkKV(*tensors, chunk.token_ids, planned.start, variant=info, inter_attention=paid)
            with forgetting.keeping(chunk.exact_key.namespace, chunk.since) as is_wanted:
                if is_wanted and self.keep(chunk.exact_key, made, recompute.alpha, recompute.max_variants):
                    num_stored += made.num_tokens
        return num_stored

    def remove_behind(self, namespace: str, chunk: str) -> int:
        """Drop the variants of other chunks that were made behind a chunk; returns how many."""
        documents = self._store.documents
        with self._lock:
            remembered = {name for name, known in self._chunks.items() if _any_behind(chunk, known.values())}
        found = [
            key
            for name in remembered | documents.chunks(namespace, _traces_of(chunk))
            for key, info in self._infos(name).items()
            if info is not None and chunk in info.prefix.chunks
        ]
        documents.remove(namespace, _traces_of(chunk))
        return sum(self._store.remove(key) for key in found)

    def _infos(self, chunk: str) -> dict[ChunkKey, VariantInfo | None]:
        """What was recorded of each stored entry of a chunk, oldest first."""
        keys = self._store.variants(chunk)
        with self._lock:
            before = self._chunks.get(chunk, {})
        unknown = [key for key in keys if key not in before]
        opened = {key: kv.variant for key in unknown if (kv := self._store.open(key)) is not None}
        with self._lock:
            known = self._chunks.setdefault(chunk, {})
            self._chunks.move_to_end(chunk)
            for key in known.keys() - set(keys):
                del known[key]
            for key, info in opened.items():
                known.setdefault(key, _Known(info))
            while len(self._chunks) > self._max_chunks:
                self._chunks.popitem(last=False)
            return {key: one.info for key, one in known.items()}


def _is_under_its_key(key: ChunkKey, info: VariantInfo) -> bool:
    """Whether exactly the exact variants stand under the key of their context: others would pass for exact."""
    return info.is_exact == (info.prefix.context == key.context)


def _any_behind(chunk: str, known: Iterable[_Known]) -> bool:
    return any(one.info is not None and chunk in one.info.prefix.chunks for one in known)


def _traces_of(chunk: str) -> str:
    """Name under which the chunks that were made behind a chunk are kept among the documents."""
    return f"\0behind {chunk}"
