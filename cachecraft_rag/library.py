"""The chunks of one model: their texts, their stored KV, and how it is computed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from tqdm.auto import tqdm

from cachecraft_rag.attention_record import ChunkRecorder
from cachecraft_rag.auto_chunks import AutoChunks
from cachecraft_rag.capability import Capability
from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.document_links import DocumentLinks
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.forgetting import Forgetting
from cachecraft_rag.history import AnswerHistory
from cachecraft_rag.keys import ChunkKey, KeyMaker, tokenizer_fingerprint
from cachecraft_rag.look_up import LookUp
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.neighbours import MAX_CHUNKS, Neighbours
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder
from cachecraft_rag.prompt_heads import PromptHeads
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.registry import ChunkRegistry
from cachecraft_rag.request_chunk import RequestChunk, request_chunks
from cachecraft_rag.similar import SimilarQuestions
from cachecraft_rag.single_flight import SingleFlight
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.thread_workers import release_workers
from cachecraft_rag.variant_choice import Variants

_WINDOW = 1024
"""Chunks that are tokenised, and known to each other, ahead of those that are being computed."""


class ChunkLibrary:
    """Finds, computes, keeps and forgets chunks.

    Args:
        adapter: The model.
        state: Tells what the model is now.
        prompts: The tokenizer.
        config: Namespace, canonical prefix, sizes.
        store: Where KV is kept.
        capability: What the model allows.

    Attributes:
        registry: Chunk texts that are looked for in prompts.
        auto_chunks: Unregistered text that is looked for too; ``None`` unless ``config.auto_chunks``.
        store: As given.
        history: What earlier answers looked at, where a policy asks for it.
        questions: What earlier questions looked at; ``None`` where that is not asked for.
        heads: What prompts begin with.
        capability: What the model allows where chunks are computed behind what they are here.
        forgetting: Keeps what is forgotten from being stored again by requests that began before.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        state: ModelState,
        prompts: PromptEncoder,
        config: EngineConfig,
        store: ChunkStore,
        capability: Capability,
    ) -> None:
        self.registry = ChunkRegistry(config.max_chunks)
        self.auto_chunks = AutoChunks(config.max_chunks) if config.auto_chunks else None
        self.store = store
        self.history = AnswerHistory()
        self.forgetting = Forgetting()
        self.questions: SimilarQuestions | None = None
        self._adapter, self._state, self._prompts, self._config = adapter, state, prompts, config
        self._tokenizer_fingerprint = tokenizer_fingerprint(prompts.tokenizer)
        self._links = DocumentLinks(store, config.max_chunks)
        self.heads = PromptHeads(store)
        self._variants = Variants(store, config.max_chunks)
        self._look_up = LookUp(store, self._variants)
        num_known = MAX_CHUNKS if config.encode.behind == "neighbours" else 0
        self._neighbours = Neighbours(store, self.forgetting, num_known)
        self._flight: SingleFlight[ChunkKey, ChunkKV] = SingleFlight()
        self._fingerprint = ""
        self._is_closed = False
        self._encoder = self._new_encoder()
        self.capability = capability.with_context(self._encoder.context_tokens)

    def register(self, texts: Sequence[str], namespace: str, document_id: str | None = None) -> int:
        """Look for these texts, perhaps of a document, in later prompts of the namespace; returns how many are new."""
        if document_id is not None:
            self._links.add(texts, namespace, document_id)
        return self.registry.register(texts, namespace)

    def warm(self, texts: Sequence[str], namespace: str, show_progress: bool, static: bool) -> int:
        """Compute and store what is not stored yet, sensitivity included; returns how many chunks were computed.

        A chunk so long that no prompt with it can reuse anything is left out.
        """
        keys, since, computed = self.keys(namespace), self.forgetting.count(namespace), 0
        for index, text in enumerate(tqdm(texts, desc="chunks", unit="chunk", disable=not show_progress)):
            if self._is_closed:
                break
            if index % _WINDOW == 0:
                window = self.introduce(texts[index : index + _WINDOW], namespace, since)
            token_ids = window[index % _WINDOW]
            key = keys.key(token_ids, self._encoder.context)
            self._links.link(text, key)
            if not token_ids or self.capability.reason_for(len(token_ids)) is not None:
                continue
            if not self.store.touch(key):  # or the chunks that are new would push it out
                chunk_kv = self._encoder.encode(token_ids, True, self._alike(key, keys.model, token_ids))
                while self._state.fingerprint() != keys.model:  # changed under our hands: this KV is of no model
                    keys = self.keys(namespace)
                    key = keys.key(token_ids, self._encoder.context)
                    self._links.link(text, key)
                    chunk_kv = self._encoder.encode(token_ids, True, self._alike(key, keys.model, token_ids))
                computed += self._keep(key, chunk_kv, since, static=static)
            elif static and (stored := self.store.get(key)) is not None:
                if stored.sensitivity is None:
                    stored = self._encoder.measure(stored, self._alike(key, keys.model, token_ids))
                self._keep(key, stored, since, keys.model, static=True)
        release_workers()
        return computed

    def introduce(self, texts: Sequence[str], namespace: str, since: int | None = None) -> list[tuple[int, ...]]:
        """Let texts be neighbours of chunks computed later, and return their ids; ``since`` as in ``look_up``."""
        since = self.forgetting.count(namespace) if since is None else since
        keys, all_ids = self.keys(namespace), [self._prompts.encode_chunk(text.strip()) for text in texts]
        for text, token_ids in zip(texts, all_ids, strict=True):
            key = keys.key(token_ids, self._encoder.context)
            self._links.link(text, key)  # what is computed behind it must be found by its document too
            self._neighbours.add(key, keys.model, token_ids, since)
        return all_ids

    def _alike(self, key: ChunkKey, model: str, token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What a chunk is to be computed behind, noted as such: ids of its neighbours, the most alike first."""
        found = self._neighbours.nearest(key.namespace, model, token_ids, self._encoder.neighbour_tokens)
        self._neighbours.note(key, found)
        return list(found.values())

    def keep_new_parts(self, namespace: str, since: int) -> None:
        """Compute and store the text nobody registered that prompts of the namespace held for the first time."""
        new = [] if self.auto_chunks is None else self.auto_chunks.take_new(namespace)
        if self.forgetting.count(namespace) == since:
            self.warm(new, namespace, show_progress=False, static=False)

    def is_stored(self, texts: Sequence[str], namespace: str) -> list[bool]:
        """Whether KV of each text is stored, made behind whatever; nothing is read, and it counts as no use."""
        return [bool(self.store.variants(chunk)) for chunk in self._chunks(texts, namespace)]

    def prefetch(self, texts: Sequence[str], namespace: str) -> int:
        """Begin to move the KV of chunks from slow tiers to memory, made behind whatever; returns how many entries."""
        return self.prefetch_chunks(self._chunks(texts, namespace))

    def prefetch_chunks(self, chunks: Iterable[str]) -> int:
        """The same for chunks by their ``ChunkKey.chunk``."""
        return self.store.prefetch([key for chunk in chunks for key in self.store.variants(chunk)])

    def invalidate(self, texts: Sequence[str], document_ids: Sequence[str], namespace: str) -> int:
        """Forget texts and documents, and drop their KV and what carries traces of it; returns how many entries."""
        texts, chunks = self._links.take(texts, document_ids, namespace, lambda texts: self._chunks(texts, namespace))
        self.registry.forget(texts, namespace)
        self.heads.forget(namespace)  # a text may have stood there before it was registered; they soon come again
        self.history.forget(namespace, chunks)
        if self.questions is not None:
            self.questions.forget(namespace, chunks)
        num_gone = sum(self.store.remove(key) for chunk in chunks for key in self.store.variants(chunk))
        num_gone += self._neighbours.forget(namespace, chunks, self._encoder.context)
        return num_gone + sum(self._variants.remove_behind(namespace, chunk) for chunk in chunks)

    def clear(self, namespace: str) -> int:
        """Forget everything in a namespace; returns how many entries were dropped."""
        for known in (self._links, self.registry, self.history, self._neighbours, self.auto_chunks):
            if known is not None:
                known.clear(namespace)
        self.heads.forget(namespace)
        if self.questions is not None:
            self.questions.forget(namespace)
        return self.store.clear(namespace)

    def keys(self, namespace: str) -> KeyMaker:
        """Keys for the model as it is now; the prefix's own KV is only right for these weights too."""
        fingerprint = self._state.fingerprint()
        if fingerprint != self._fingerprint:
            self._fingerprint, self._encoder = fingerprint, self._new_encoder()
        return KeyMaker(fingerprint, self._tokenizer_fingerprint, namespace)

    def look_up(
        self,
        encoded: EncodedPrompt,
        keys: KeyMaker,
        lazily: bool = True,
        alpha: float | None = None,
        since: int | None = None,
    ) -> list[RequestChunk]:
        """The chunks of a namespace's prompt, with the stored KV that was found; see ``LookUp.find``.

        ``since`` is ``Forgetting.count`` when the prompt came, now by default.
        """
        chunks = self._request_chunks(encoded, keys, None if alpha is None else 1.0, since)
        self._look_up.find(chunks, lazily, alpha)
        return chunks

    def look_up_exact(self, encoded: EncodedPrompt, keys: KeyMaker) -> list[RequestChunk]:
        """Find the stored KV, read in full, of those chunks for which it is exact; the others have none."""
        chunks = self._request_chunks(encoded, keys)
        self._look_up.find_exact(chunks)
        return chunks

    def _request_chunks(
        self, encoded: EncodedPrompt, keys: KeyMaker, cfo: float | None = None, since: int | None = None
    ) -> list[RequestChunk]:
        """The chunks of a prompt before anything is looked up; ``cfo`` is that of what is not found."""
        since = self.forgetting.count(keys.namespace) if since is None else since
        chunks = request_chunks(encoded, keys, self._encoder.context, cfo, since)
        for span, chunk in zip(encoded.spans, chunks, strict=True):
            for origin in span.origins or (span.text,):
                self._links.link(origin, chunk.key if chunk.whole is None else chunk.whole.key)
        return chunks

    def keep_head(self, encoded: EncodedPrompt, keys: KeyMaker, kv: PromptKV, since: int) -> int:
        """Keep what a prompt and an earlier one begin with; returns how many tokens were stored."""
        with self.forgetting.keeping(keys.namespace, since) as is_wanted:
            return self.heads.learn(encoded, keys, kv) if is_wanted and not self._is_closed else 0

    def settle(self, chunks: Sequence[RequestChunk]) -> None:
        """Move what was read from slow tiers for a request to memory."""
        for chunk in chunks:
            if chunk.tier is not None and chunk.entry is not None and chunk.entry.is_read:
                self.store.settle(chunk.key, chunk.entry, chunk.tier)

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
        self._neighbours.meet(chunks if with_sensitivity else ())
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
            self._links.note_piece(chunk)
            started = time.perf_counter()
            alike = self._alike(chunk.key, chunk.model, chunk.token_ids) if with_sensitivity else []
            chunk_kv = self._encoder.encode(chunk.token_ids, with_sensitivity, alike)
            self.store.computed(chunk_kv.num_tokens, time.perf_counter() - started)
            counts["computed"] += self._encoder.num_computed(chunk_kv.num_tokens, with_sensitivity, alike)
            is_kept = self._keep(chunk.key, chunk_kv, chunk.since, chunk.model)
            counts["stored"] += chunk_kv.num_tokens if is_kept else 0
        return chunk_kv

    def keep_exact(self, plan: RequestPlan, chunks: Sequence[RequestChunk], kv: PromptKV) -> int:
        """Store the KV of chunks that a request computed exactly in place: the same beginning reuses it as it is.

        Returns:
            Tokens whose KV was stored.
        """
        num_stored = 0
        for planned, chunk in zip(plan.chunks, chunks, strict=True):
            if not planned.is_exact:
                self._links.note_piece(chunk)
                keys, values = kv.slice(planned.start, planned.end)
                exact = ChunkKV(keys, values, chunk.token_ids, planned.start)
                num_stored += self._keep(chunk.exact_key, exact, chunk.since) * exact.num_tokens
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
        for chunk in chunks:
            self._links.note_piece(chunk)  # others are kept behind it
        if recorder is not None:
            num_stored = self._variants.keep_computed(plan, chunks, kv, recorder, recompute, self.forgetting)
        for index, chunk in enumerate(chunks):
            if index not in plan.computed_exactly and chunk.chunk_kv is None and not chunk.is_declined:
                self._flight.run(chunk.key, partial(self._encode, chunk, False, counts))
        return num_stored + counts["stored"]

    def measure_new(self, chunks: Sequence[RequestChunk]) -> None:
        """Measure the sensitivity of chunks that are stored without it, if they were made behind our own contexts."""
        self._neighbours.meet(chunks)
        for chunk in chunks:
            is_ours = not chunk.is_exact and chunk.key.context == self._encoder.context
            stored = self.store.get(chunk.key) if is_ours else None
            if stored is not None and stored.sensitivity is None and chunk.part_of(chunk.key, stored):
                alike = self._alike(chunk.key, chunk.model, stored.token_ids)
                self._keep(chunk.key, self._encoder.measure(stored, alike), chunk.since, chunk.model)

    def close(self) -> None:
        """Release the stored KV; what is still being computed is not kept."""
        self._is_closed = True
        self._encoder = self._new_encoder()  # without the KV of its prefix
        self.store.close()

    def _keep(self, key: ChunkKey, chunk_kv: ChunkKV, since: int, model: str = "", static: bool = False) -> bool:
        """Store an entry; not if something was forgotten since, or the model is no longer ``model``, where given."""
        cfo = self._config.recompute.ratio if key.context == self._encoder.context else 0.0
        with self.forgetting.keeping(key.namespace, since) as is_wanted:
            is_wanted = is_wanted and not self._is_closed and (not model or self._state.fingerprint() == model)
            return is_wanted and self.store.put(key, chunk_kv, static=static, cfo=cfo)

    def _chunks(self, texts: Iterable[str], namespace: str) -> list[str]:
        """``ChunkKey.chunk`` of texts."""
        keys = self.keys(namespace)
        return [keys.chunk(self._prompts.encode_chunk(text.strip())) for text in texts]

    def _new_encoder(self) -> ChunkEncoder:
        return ChunkEncoder.of(self._config.encode, self._adapter, self._prompts)
