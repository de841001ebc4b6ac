"""Which chunks an engine can reuse already."""

from __future__ import annotations

from collections.abc import Iterable

from cachecraft_rag import CacheCraftEngine


def chunk_keys(engine: CacheCraftEngine, texts: Iterable[str], namespace: str) -> list[str]:
    """What the stored KV of each text is found by, for the model as it is now.

    Args:
        engine: The engine.
        texts: Chunk texts.
        namespace: Whose chunks.
    """
    keys = engine.library.keys(namespace)
    return [keys.chunk(engine.prompts.encode_chunk(text.strip())) for text in texts]


def is_stored(engine: CacheCraftEngine, chunk_key: str) -> bool:
    """Whether KV of a chunk is stored, computed behind whatever; asking doesn't count as a use."""
    return bool(engine.store.variants(chunk_key))
