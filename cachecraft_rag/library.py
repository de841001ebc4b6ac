"""The chunks of one model: their texts, their stored KV, and how it is computed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from tqdm.auto import tqdm

from cachecraft_rag.attention_record import ChunkRecorder
from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.document_texts import DocumentTexts
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.history import AnswerHistory
from cachecraft_rag.keys import ChunkKey, KeyMaker, context_hash, tokenizer_fingerprint
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.registry import ChunkRegistry
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.single_flight import SingleFlight
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.variant_choice import Variants

_NEUTRAL_PASSAGE = "The following passages were collected from several sources. " * 6


class ChunkLibrary:
    """Finds, computes, keeps and forgets chunks.

    Args:
        adapter: The model.
        state: Tells what the model is now.
        prompts: The tokenizer.
        config: Namespace, canonical prefix, sizes.
        store: Where KV is kept.

    Attributes:
        registry: Chunk texts that are looked for in prompts.
        store: As given.
        history: What earlier answers looked at, where a policy asks for it.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        state: ModelState,
        prompts: PromptEncoder,
        config: EngineConfig,
        store: ChunkStore,
    ) -> None:
        self.registry = ChunkRegistry(config.max_chunks)
        self.store = store
        self.history = AnswerHistory()
        self._adapter, self._state, self._prompts, self._config = adapter, state, prompts, config
        self._tokenizer_fingerprint = tokenizer_fingerprint(prompts.tokenizer)
        self._document_texts = DocumentTexts(config.max_chunks)
        self._variants = Variants(store, config.max_chunks)
        self._flight: SingleFlight[ChunkKey, ChunkKV] = SingleFlight()
        self._fingerprint = ""
        self._encoder = self._new_encoder()

    def register(self, texts: Sequence[str], namespace: str, document_id: str | None = None) -> int:
        """Look for these texts, perhaps of a document, in later prompts of the namespace; returns how many are new."""
        if document_id is not None:
            self._document_texts.add(texts, namespace, document_id)
        return self.registry.register(texts, namespace)

    def warm(self, texts: Sequence[str], namespace: str, show_progress: bool, static: bool) -> int:
        """Compute and store what is not stored yet, sensitivity included; returns how many chunks were computed."""
        keys, encoder = self._keys(namespace), self._encoder
        computed = 0
        for text in tqdm(texts, desc="chunks", unit="chunk", disable=not show_progress):
            token_ids = self._prompts.encode_chunk(text.strip())
            key = keys.key(token_ids, encoder.context)
            self._link(text, key)
            if token_ids and not self.store.contains(key):
                computed += self._keep(key, encoder.encode(token_ids, with_sensitivity=True), static)
        return computed

    def prefetch(self, texts: Sequence[str], namespace: str) -> int:
        """Begin to move the KV of chunks from slow tiers to memory, made behind whatever; returns how many entries."""
        chunks = self._chunks(texts, namespace)
        return self.store.prefetch([key for chunk in chunks for key in self.store.variants(chunk)])

    def invalidate(self, texts: Sequence[str], document_ids: Sequence[str], namespace: str) -> int:
        """Forget texts and documents, and drop their KV and what carries traces of it; returns how many entries."""
        chunks = set(self._chunks(texts, namespace))
        for document_id in document_ids:
            unlinked = self._document_texts.take(namespace, document_id)
            texts = [*texts, *unlinked]
            chunks |= self.store.documents.chunks(namespace, document_id).union(self._chunks(unlinked, namespace))
            self.store.documents.remove(namespace, document_id)
        self.registry.forget(texts, namespace)
        self.history.forget(namespace, chunks)
        num_gone = sum(self.store.remove(key) for chunk in chunks for key in self.store.variants(chunk))
        return num_gone + sum(self._variants.remove_behind(namespace, chunk) for chunk in chunks)

    def clear(self, namespace: str) -> int:
        """Forget everything in a namespace; returns how many entries were dropped."""
        self._document_texts.clear(namespace)
        self.registry.clear(namespace)
        self.history.clear(namespace)
        return self.store.clear(namespace)

    def look_up(
        self, encoded: EncodedPrompt, namespace: str, lazily: bool = True, alpha: float | None = None
    ) -> list[RequestChunk]:
        """Find the stored KV of every chunk of a namespace's prompt: exact before canonical, or by lowest CFO.

        An entry whose token ids differ (a hash collision) is removed and counts as missing.

        Args:
            encoded: The prompt.
            namespace: Whose chunks.
            lazily: Whether entries of slow tiers may be read later, and left where computing is quicker.
            alpha: Strength of the correction, to choose among all variants; ``None`` for exact and canonical ones.
        """
        keys = self._keys(namespace)
        canonical = self._encoder.context
        token_ids = np.asarray(encoded.token_ids, dtype=np.int32)
        chunks: list[RequestChunk] = []
        for span in encoded.spans:
            ids = encoded.token_ids[span.start : span.end]
            exact_key = keys.key(ids, context_hash(token_ids[: span.start]))
            canonical_key = ChunkKey(exact_key.namespace, exact_key.chunk, canonical)
            preceding = tuple(chunk.exact_key.chunk for chunk in chunks)
            cfo = None if alpha is None else 1.0  # of what is not found
            chunks.append(RequestChunk(ids, exact_key, canonical_key, preceding=preceding, cfo=cfo))
            self._link(span.text, exact_key)
        find = partial(self._find if lazily else self._load, alpha)
        readers = self.store.readers if lazily else None
        # Slow tiers are asked for several chunks at the same time.
        list(map(find, chunks) if readers is None else readers.map(find, chunks))
        return chunks

    def _link(self, text: str, key: ChunkKey) -> None:
        """Note the documents of a text that is used, where every process that shares the store finds them."""
        for document in self._document_texts.to_link(text, key.namespace):
            self.store.documents.add(key.namespace, document, [key.chunk])

    def _usable(self, chunk: RequestChunk, alpha: float | None) -> Iterable[tuple[ChunkKey, float | None]]:
        """Keys of the entries that would do for a chunk, the best first, and their CFO."""
        if alpha is None:
            return [(key, None) for key in dict.fromkeys((chunk.exact_key, chunk.key))]
        return self._variants.ranked(chunk.exact_key, chunk.key.context, chunk.prefix, len(chunk.token_ids), alpha)

    def _find(self, alpha: float | None, chunk: RequestChunk) -> None:
        for key, cfo in self._usable(chunk, alpha):
            found = self.store.find(key)
            if found is None:
                continue
            if found.kv is None:
                chunk.is_declined = True
            elif self._take(chunk, key, cfo, found.kv, found.tier):
                return

    def _load(self, alpha: float | None, chunk: RequestChunk) -> None:
        for key, cfo in self._usable(chunk, alpha):
            found = self.store.get_with_tier(key)
            if found is not None and self._take(chunk, key, cfo, *found):
                return

    def _take(self, chunk: RequestChunk, key: ChunkKey, cfo: float | None, kv: LayeredKV, tier: str) -> bool:
        """Use an entry for a chunk, unless it holds other tokens: then the entry goes."""
        if not kv.matches(chunk.token_ids):
            self.store.remove(key)
            return False
        chunk.key, chunk.chunk_kv, chunk.tier, chunk.is_declined = key, kv, tier, False
        if cfo is not None:
            chunk.cfo = cfo
            self._variants.used(key, cfo)
        return True

    def settle(self, chunks: Sequence[RequestChunk]) -> None:
        """Move what was read from slow tiers for a request to memory."""
        for chunk in chunks:
            if chunk.tier is not None and chunk.chunk_kv is not None and chunk.chunk_kv.is_read:
                self.store.settle(chunk.key, chunk.chunk_kv, chunk.tier)

    def encode_missing(
        self, plan: RequestPlan, chunks: Sequence[RequestChunk], with_sensitivity: bool
    ) -> tuple[int, int]:
        """Compute and store the chunks that the plan wants encoded.

        One that occurs twice is computed once, and so is one that several requests want at the same time.

        Returns:
            Tokens computed (passes for the sensitivity included), and tokens whose KV was stored.
        """
        fresh: dict[ChunkKey, LayeredKV] = {}
        counts: Counter[str] = Counter()
        for planned, chunk in zip(plan.chunks, chunks, strict=True):
            if planned.action is not Action.ENCODE:
                continue
            if chunk.key not in fresh:
                encode = partial(self._encode, chunk, with_sensitivity, counts)
                fresh[chunk.key] = self._flight.run(chunk.key, encode)
            chunk.chunk_kv = fresh[chunk.key]
        return counts["computed"], counts["stored"]

    def _encode(self, chunk: RequestChunk, with_sensitivity: bool, counts: Counter[str]) -> ChunkKV:
        """Compute and store a chunk, unless another request has stored it since it was looked up."""
        chunk_kv = None if chunk.is_declined else self.store.get(chunk.key)
        if chunk_kv is None or not chunk_kv.matches(chunk.token_ids):
            started = time.perf_counter()
            chunk_kv = self._encoder.encode(chunk.token_ids, with_sensitivity)
            self.store.computed(chunk_kv.num_tokens, time.perf_counter() - started)
            counts["computed"] += chunk_kv.num_tokens * (2 if with_sensitivity else 1)
            counts["stored"] += chunk_kv.num_tokens if self._keep(chunk.key, chunk_kv) else 0
        return chunk_kv

    def keep_exact(self, plan: RequestPlan, chunks: Sequence[RequestChunk], kv: PromptKV) -> int:
        """Store the KV of chunks that a request computed exactly in place: the same beginning reuses it as it is.

        Returns:
            Tokens whose KV was stored.
        """
        num_stored = 0
        for planned, chunk in zip(plan.chunks, chunks, strict=True):
            if not planned.is_exact:
                keys, values = kv.slice(planned.start, planned.end)
                exact = ChunkKV(keys, values, chunk.token_ids, planned.start)
                num_stored += self._keep(chunk.exact_key, exact) * exact.num_tokens
        return num_stored

    def keep_variants(
        self,
        plan: RequestPlan,
        chunks: Sequence[RequestChunk],
        kv: PromptKV,
        recorder: ChunkRecorder | None,
        recompute: RecomputeConfig,
    ) -> int:
        """Store what a request that went by CFO computed in place.

        A chunk behind exact KV only becomes a variant. One behind approximate KV is not stored as it was computed: when
        the store has nothing of it, it is computed once more, alone.

        Args:
            plan: The request's plan.
            chunks: Its chunks.
            kv: Its buffer.
            recorder: What was recorded of ``plan.computed_exactly``; ``None`` where there are none.
            recompute: Its settings.

        Returns:
            Tokens whose KV was stored.
        """
        num_stored, counts = 0, Counter[str]()
        exact = dict.fromkeys(plan.computed_exactly)
        for namespace in {chunk.exact_key.namespace for chunk in chunks}:
            behind = {chunks[index].exact_key.chunk: chunks[index].preceding for index in exact}
            self._variants.note_traces(namespace, behind)
        for index, (planned, chunk) in enumerate(zip(plan.chunks, chunks, strict=True)):
            if index in exact:
                assert recorder is not None
                info, paid = recorder.variant(index, chunk.prefix)
                tensors = kv.slice(planned.start, planned.end)
                made = ChunkKV(*tensors, chunk.token_ids, planned.start, variant=info, inter_attention=paid)
                is_kept = self._variants.keep(chunk.exact_key, made, recompute.alpha, recompute.max_variants)
                num_stored += made.num_tokens * is_kept
            elif chunk.chunk_kv is None and not chunk.is_declined:
                self._flight.run(chunk.key, partial(self._encode, chunk, False, counts))
        return num_stored + counts["stored"]

    def measure_new(self, chunks: Sequence[RequestChunk]) -> None:
        """Measure the sensitivity of chunks that are stored without it."""
        for chunk in chunks:
            stored = None if chunk.is_exact else self.store.get(chunk.key)
            if stored is not None and stored.sensitivity is None and stored.matches(chunk.token_ids):
                self._keep(chunk.key, self._encoder.measure(stored))

    def close(self) -> None:
        """Release the stored KV."""
        self._encoder = self._new_encoder()  # without the KV of its prefix
        self.store.close()

    def _keep(self, key: ChunkKey, chunk_kv: ChunkKV, static: bool = False) -> bool:
        is_canonical = key.context == self._encoder.context
        return self.store.put(key, chunk_kv, static=static, cfo=self._config.recompute.ratio if is_canonical else 0.0)

    def _chunks(self, texts: Iterable[str], namespace: str) -> list[str]:
        """``ChunkKey.chunk`` of texts."""
        keys = self._keys(namespace)
        return [keys.chunk(self._prompts.encode_chunk(text.strip())) for text in texts]

    def _keys(self, namespace: str) -> KeyMaker:
        """Keys for the model as it is now; the prefix's own KV is only right for these weights too."""
        fingerprint = self._state.fingerprint()
        if fingerprint != self._fingerprint:
            self._fingerprint, self._encoder = fingerprint, self._new_encoder()
        return KeyMaker(fingerprint, self._tokenizer_fingerprint, namespace)

    def _new_encoder(self) -> ChunkEncoder:
        settings = self._config.encode
        instruction = settings.instruction if settings.behind == "prefix" else ""
        prefix = () if settings.behind == "none" else self._prompts.head_ids(instruction)
        return ChunkEncoder(self._adapter, prefix, self._prompts.head_ids(_NEUTRAL_PASSAGE))


def as_texts(texts: Iterable[str]) -> list[str]:
    """Several texts as a list.

    Raises:
        ValueError: It is one string, which would be read as one text per character.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts: {texts[:40]!r} is one string; give a list of strings")
    return list(texts)
