"""The chunks of one model: their texts, their stored KV, and how it is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tqdm.auto import tqdm

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import EngineConfig
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.keys import ChunkKey, KeyMaker, context_hash, tokenizer_fingerprint
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.registry import ChunkRegistry
from cachecraft_rag.single_flight import SingleFlight
from cachecraft_rag.store import ChunkStore

_NEUTRAL_PASSAGE = "The following passages were collected from several sources. " * 6
_HOST = torch.device("cpu")


@dataclass(eq=False)
class RequestChunk:
    """A chunk of a request.

    Attributes:
        token_ids: Its ids.
        exact_key: Key of its KV behind exactly the tokens that precede it in this request.
        key: Key of the entry that is used: the exact one, or the one behind the canonical prefix.
        chunk_kv: The KV that is used; ``None`` until it is loaded or computed.
        tier: Name of the tier it was found in; ``None`` when it was not stored.
    """

    token_ids: tuple[int, ...]
    exact_key: ChunkKey
    key: ChunkKey
    chunk_kv: ChunkKV | None = None
    tier: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the KV that is used stands behind the same tokens as here."""
        return self.key == self.exact_key


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
        self._adapter, self._state, self._prompts, self._config = adapter, state, prompts, config
        self._tokenizer_fingerprint = tokenizer_fingerprint(prompts.tokenizer)
        self._flight: SingleFlight[ChunkKey, ChunkKV] = SingleFlight()
        self._fingerprint = ""
        self._encoder = self._new_encoder()

    def register(self, texts: Iterable[str], namespace: str) -> int:
        """Look for these texts in later prompts of the namespace; returns how many are new."""
        return self.registry.register(texts, namespace)

    def warm(self, texts: Sequence[str], namespace: str, show_progress: bool) -> int:
        """Compute and store what is not stored yet, sensitivity included; returns how many chunks were computed."""
        keys, encoder = self._keys(namespace), self._encoder
        computed = 0
        for text in tqdm(texts, desc="chunks", unit="chunk", disable=not show_progress):
            token_ids = self._prompts.encode_chunk(text.strip())
            key = keys.key(token_ids, encoder.context)
            if token_ids and not self.store.contains(key):
                computed += self._keep(key, encoder.encode(token_ids, with_sensitivity=True))
        return computed

    def invalidate(self, texts: Sequence[str] | None, namespace: str) -> int:
        """Forget texts of a namespace (all for ``None``) and drop their KV, made behind whatever; returns how many."""
        if texts is None:
            self.registry.clear(namespace)
            return self.store.clear(namespace)
        self.registry.forget(texts, namespace)
        keys = self._keys(namespace)
        chunks = [keys.chunk(self._prompts.encode_chunk(text.strip())) for text in texts]
        return sum(self.store.remove(key) for chunk in chunks for key in self.store.variants(chunk))

    def look_up(self, encoded: EncodedPrompt, namespace: str) -> list[RequestChunk]:
        """Find the stored KV of every chunk of a namespace's prompt, exact before canonical.

        An entry whose token ids differ (a hash collision) is removed and counts as missing.
        """
        keys = self._keys(namespace)
        canonical = self._encoder.context
        token_ids = np.asarray(encoded.token_ids, dtype=np.int32)
        chunks = []
        for span in encoded.spans:
            ids = encoded.token_ids[span.start : span.end]
            exact_key = keys.key(ids, context_hash(token_ids[: span.start]))
            canonical_key = ChunkKey(exact_key.namespace, exact_key.chunk, canonical)
            chunk = RequestChunk(ids, exact_key, canonical_key)
            for key in dict.fromkeys((exact_key, canonical_key)):
                found = self.store.get_with_tier(key)
                if found is not None and found[0].matches(ids):
                    chunk.key, (chunk.chunk_kv, chunk.tier) = key, found
                    break
                if found is not None:
                    self.store.remove(key)
            chunks.append(chunk)
        return chunks

    def encode_missing(
        self, plan: RequestPlan, chunks: Sequence[RequestChunk], with_sensitivity: bool
    ) -> tuple[int, int]:
        """Compute and store the chunks that the plan wants encoded.

        One that occurs twice is computed once, and so is one that several requests want at the same time.

        Returns:
            Tokens computed (passes for the sensitivity included), and tokens whose KV was stored.
        """
        fresh: dict[ChunkKey, ChunkKV] = {}
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
        chunk_kv = self.store.get(chunk.key)
        if chunk_kv is None or not chunk_kv.matches(chunk.token_ids):
            chunk_kv = self._encoder.encode(chunk.token_ids, with_sensitivity)
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

    def _keep(self, key: ChunkKey, chunk_kv: ChunkKV) -> bool:
        return self.store.put(key, chunk_kv.to(_HOST))

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
