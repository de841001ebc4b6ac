"""Chunks of a sample with their KV, and engines on stores of their own that are filled with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.evaluate.teacher import score
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store_config import MemoryTierConfig


@dataclass(frozen=True, eq=False)
class StoredChunk:
    """A chunk and its KV.

    Attributes:
        text: Its text.
        key: What any engine of the same model and settings looks for it by.
        kv: Its KV, sensitivity included.
    """

    text: str
    key: ChunkKey
    kv: ChunkKV


def distinct_chunks(prompts: Iterable[Iterable[str]], limit: int | None = None) -> list[str]:
    """The chunks of some prompts, each once, in order of appearance; at most so many, ``None`` for all."""
    return list(dict.fromkeys(chunk for chunks in prompts for chunk in chunks))[:limit]


def stored_chunks(engine: CacheCraftEngine, texts: Iterable[str]) -> list[StoredChunk]:
    """Chunks with their KV, which is computed where the engine's store lacks it.

    Raises:
        RuntimeError: The store has no room for one of them.
    """
    chunks = []
    for text in texts:
        engine.warm([text])
        request = engine.intake.take(RagPrompt(chunks=(text,)), SamplingConfig(max_new_tokens=1), RecomputeConfig())
        found = engine.library.look_up(request.encoded, engine.library.keys(request.namespace))
        if len(found) != 1 or found[0].chunk_kv is None:
            raise RuntimeError("a chunk of the sample is not stored: give the store more room")
        chunks.append(StoredChunk(text, found[0].key, found[0].chunk_kv.complete()))
    return chunks


def engine_with(engine: CacheCraftEngine, **store: Any) -> CacheCraftEngine:
    """An engine on the same model with tiers of its own, none of them in host memory unless it is named.

    Args:
        engine: The engine.
        **store: Fields of ``StoreConfig`` that replace those of the engine; hot and warm have their share of
            ``device_size``.
    """
    given = engine.config.store
    tiers = {
        "hot": given.hot.model_copy(update={"size": None}),
        "warm": given.warm.model_copy(update={"size": None}),
        "cold": MemoryTierConfig(size=0),
        "disk": None,
        "remote": None,
    }
    config = engine.config.model_copy(update={"store": given.model_copy(update={**tiers, **store})})
    made = CacheCraftEngine(engine.model, engine.tokenizer, config)
    assert made.fingerprint == engine.fingerprint  # and its first request need not take it
    return made


def first_token(
    engine: CacheCraftEngine, chunks: Sequence[str], question: str, instruction: str, recompute: RecomputeConfig
) -> RequestStats:
    """What a request does up to its first token; nothing is learnt from it, but chunks that are missing are stored."""
    prompt = RagPrompt(system=instruction, chunks=tuple(chunks), question=question)
    return score(engine, prompt, (0,), recompute=recompute).stats
