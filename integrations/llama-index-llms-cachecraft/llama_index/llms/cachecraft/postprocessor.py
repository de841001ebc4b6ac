"""Announces the nodes of a query explicitly, and orders equally relevant ones for reuse if asked to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from cachecraft_rag.keys import digest
from llama_index.llms.cachecraft.base import CacheCraftLLM
from llama_index.llms.cachecraft.nodes import chunk_text, texts_by_document


class CacheCraftPostprocessor(BaseNodePostprocessor):
    """Makes nodes known to an LLM's engine, with the documents they come from.

    Needed with ``auto_register=False`` only, or for ``reorder``. Put it last, so that it sees the nodes as the LLM
    will.

    Args:
        llm: The LLM that reads the nodes.
        **fields: The fields below.

    Examples:
        >>> index.as_query_engine(llm=llm, node_postprocessors=[CacheCraftPostprocessor(llm, reorder=True)])
    """

    reorder: bool = Field(
        default=False,
        description=(
            "Put nodes of equal relevance into an order that suits reuse: stored ones first, otherwise the same order "
            "for every query. Prompts that begin alike reuse without recomputing."
        ),
    )
    tolerance: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="How far scores of equally relevant nodes may be apart."
    )

    _llm: CacheCraftLLM = PrivateAttr()

    def __init__(self, llm: CacheCraftLLM, **fields: Any) -> None:
        if not isinstance(llm, CacheCraftLLM):
            raise ValueError(f"llm: a {type(llm).__name__} was given; give a CacheCraftLLM")
        super().__init__(**fields)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        engine, namespace = self._llm.engine, self._llm.namespace
        for document_id, texts in texts_by_document(nodes).items():
            engine.register(texts, namespace, document_id)
        if not self.reorder:
            return nodes
        chunks = [chunk_text(node).strip() for node in nodes]
        is_new = [not is_stored for is_stored in engine.is_stored(chunks, namespace)]
        ranks = list(zip(is_new, map(digest, chunks), strict=True))
        return [nodes[index] for group in self._groups(nodes) for index in sorted(group, key=ranks.__getitem__)]

    def _groups(self, nodes: Iterable[NodeWithScore]) -> list[list[int]]:
        """Indices of neighbours whose scores are as good as equal; a node without a score is equal to its like."""
        groups: list[list[int]] = []
        first: float | None = None
        for index, node in enumerate(nodes):
            is_equal = node.score is first if None in (node.score, first) else self._are_close(node.score, first)
            if not groups or not is_equal:
                groups.append([])
                first = node.score
            groups[-1].append(index)
        return groups

    def _are_close(self, score: float | None, other: float | None) -> bool:
        assert score is not None
        assert other is not None
        return abs(score - other) <= self.tolerance
