"""One request on its way through the engine: its chunks, its plan, its figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.decode import NextLogits
from cachecraft_rag.keys import ChunkKey, KeyMaker, context_hash
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store import ChunkStore


@dataclass(eq=False)
class RequestChunk:
    """A chunk of a request.

    Attributes:
        token_ids: Its ids.
        exact_key: Key of its KV behind exactly the tokens that precede it here.
        canonical_key: Key of its KV behind the canonical prefix.
        key: The key whose entry is used.
        chunk_kv: The KV that is used; ``None`` until it is loaded or computed.
    """

    token_ids: tuple[int, ...]
    exact_key: ChunkKey
    canonical_key: ChunkKey
    key: ChunkKey
    chunk_kv: ChunkKV | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the KV that is used stands behind the same tokens as here."""
        return self.key == self.exact_key


def look_up(encoded: EncodedPrompt, keys: KeyMaker, canonical_context: str, store: ChunkStore) -> list[RequestChunk]:
    """Find the stored KV of every chunk of a prompt, exact before canonical.

    An entry whose token ids differ (a hash collision) is removed and counts as missing.
    """
    token_ids = np.asarray(encoded.token_ids, dtype=np.int32)
    chunks = []
    for span in encoded.spans:
        ids = encoded.token_ids[span.start : span.end]
        exact_key = keys.key(ids, context_hash(token_ids[: span.start]))
        canonical_key = ChunkKey(exact_key.namespace, exact_key.chunk, canonical_context)
        chunk = RequestChunk(ids, exact_key, canonical_key, canonical_key)
        for key in dict.fromkeys((exact_key, canonical_key)):
            chunk_kv = store.get(key)
            if chunk_kv is not None and not chunk_kv.matches(ids):
                store.remove(key)
            elif chunk_kv is not None:
                chunk.key, chunk.chunk_kv = key, chunk_kv
                break
        chunks.append(chunk)
    return chunks


@dataclass(eq=False)
class Request:
    """What the engine knows of a request while it runs.

    Attributes:
        encoded: The prompt.
        sampling: How the answer is drawn.
        recompute: Policy and ratio.
        started: ``time.perf_counter()`` at the call.
        figures: Fields of ``RequestStats`` as they become known.
        chunks: The chunks, when they are reused.
        plan: What happens to them.
        kv: The prompt's buffer; ``None`` for a model that keeps its own cache.
        logits: Logits of the last prompt token, ``[vocab_size]`` float32.
        next_logits: The decoding step.
    """

    encoded: EncodedPrompt
    sampling: SamplingConfig
    recompute: RecomputeConfig
    started: float
    figures: dict[str, Any] = field(default_factory=dict)
    chunks: list[RequestChunk] = field(default_factory=list)
    plan: RequestPlan | None = None
    kv: PromptKV | None = None
    logits: torch.Tensor | None = None
    next_logits: NextLogits | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.encoded.token_ids)

    @property
    def capacity(self) -> int:
        """Length of the prompt and the longest answer."""
        return self.num_tokens + self.sampling.max_new_tokens

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to a figure."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.figures[name] = self.figures.get(name, 0.0) + time.perf_counter() - started

    def count_lookups(self, tier: str) -> None:
        """Fill in hits, misses and bytes after the chunks were looked up."""
        loaded = [chunk.chunk_kv for chunk in self.chunks if chunk.chunk_kv is not None]
        self.figures |= {
            "chunk_hits": len(loaded),
            "chunk_misses": len(self.chunks) - len(loaded),
            "hits_by_tier": {tier: len(loaded)} if loaded else {},
            "bytes_loaded": sum(chunk_kv.nbytes for chunk_kv in loaded),
        }

    def count_tokens(self, selected: torch.Tensor) -> None:
        """Fill in the token counts; ``selected`` are the positions that were computed again."""
        assert self.plan is not None
        hits = [chunk for chunk in self.plan.chunks if chunk.action is Action.REUSE]
        stored = sum(chunk.end - chunk.start for chunk in hits)
        again = sum(int(((selected >= chunk.start) & (selected < chunk.end)).sum()) for chunk in hits)
        again += sum(chunk.end == self.num_tokens for chunk in hits)  # the last token is computed in any case
        self.figures |= {
            "reused_tokens": stored - again,
            "recomputed_tokens": again,
            "prefilled_tokens": self.num_tokens - stored,
        }

    def stats(self) -> RequestStats:
        """The figures so far."""
        return RequestStats(prompt_tokens=self.num_tokens, ratio=self.recompute.ratio, **self.figures)
