"""Computes the KV of chunks while documents are ingested, so that the first question finds it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.keys import digest
from llama_index.llms.cachecraft.base import CacheCraftLLM
from llama_index.llms.cachecraft.nodes import texts_by_document
from llama_index.llms.cachecraft.stored_chunks import chunk_keys, is_stored

# What tells the stores of two engines apart that keep nothing outside of this process.
_process_stores: WeakKeyDictionary[CacheCraftEngine, str] = WeakKeyDictionary()


class CacheCraftWarmer(TransformComponent):
    """The last step of an ingestion pipeline: makes nodes known to an LLM's engine, and computes their KV.

    Nodes pass through unchanged. What is stored already is left alone, so that a second run is cheap.

    An ``IngestionPipeline`` skips a step whose nodes and settings it has seen. That would leave a new store cold, so
    ``fingerprint`` is part of the settings: it stands for model, namespace and store, and changes when chunks of this
    warmer are no longer stored. Where the folder of a disk tier was emptied between two processes, call ``warm``, or
    make the pipeline with ``disable_cache=True``.

    Args:
        llm: The LLM that will read the nodes; loaded when the first nodes come.
        **fields: The fields below.

    Examples:
        >>> IngestionPipeline(transformations=[CacheAlignedNodeParser.from_llm(llm), CacheCraftWarmer(llm)])
    """

    precompute: bool = Field(default=True, description="False only makes the chunks known; the first prompt computes.")
    static: bool = Field(default=False, description="Keep the KV as long as the store lives, whatever else comes.")
    show_progress: bool = Field(default=False, description="Whether to show a progress bar.")

    _llm: CacheCraftLLM = PrivateAttr()
    _warmed: set[str] = PrivateAttr(default_factory=set)
    _round: int = PrivateAttr(default=0)

    def __init__(self, llm: CacheCraftLLM, **fields: Any) -> None:
        if not isinstance(llm, CacheCraftLLM):
            raise ValueError(f"llm: a {type(llm).__name__} was given; give a CacheCraftLLM")
        super().__init__(**fields)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftWarmer"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the chunks of nodes, and hand the nodes on."""
        self.warm(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the chunks of nodes in a thread, and hand the nodes on."""
        await asyncio.to_thread(self.warm, nodes)
        return nodes

    def warm(self, nodes: Sequence[BaseNode]) -> int:
        """Warm the chunks of nodes, whatever a pipeline has seen of them before.

        Args:
            nodes: The nodes.

        Returns:
            How many chunks were computed.
        """
        engine, namespace = self._llm.engine, self._llm.namespace
        num_computed = 0
        for document_id, texts in texts_by_document(nodes).items():
            if not self.precompute:
                engine.register(texts, namespace, document_id)
                continue
            num_computed += engine.warm(
                texts, self.show_progress, namespace, document_id=document_id, static=self.static
            )
            self._warmed.update(chunk_keys(engine, texts, namespace))
        return num_computed

    @property
    def fingerprint(self) -> str:
        """Stands for model, namespace and store; another one once chunks of this warmer are no longer stored."""
        engine, namespace = self._llm.engine, self._llm.namespace
        if not all(is_stored(engine, key) for key in self._warmed):
            self._round += 1
            self._warmed.clear()
        return digest("warmer", engine.fingerprint, namespace, _store_name(engine), str(self._round))

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The settings with the fingerprint; a pipeline's cache asks for them before every run."""
        return {**super().to_dict(**kwargs), "fingerprint": self.fingerprint}

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a CacheCraftWarmer can't be pickled: what another process computes is lost to this one; "
            "run the pipeline with num_workers=1"
        )


def _store_name(engine: CacheCraftEngine) -> str:
    """What tells an engine's store from others; the same in every process for tiers that outlive one."""
    config = engine.config.store
    places = [config.disk.path if config.disk else "", config.remote.url if config.remote else ""]
    tiers = getattr(engine.store, "tiers", [engine.store])
    if any(places) and any(tier.is_persistent for tier in tiers):
        return digest("store", *places)
    return _process_stores.setdefault(engine, uuid.uuid4().hex)
