"""``CacheCraftWarmer``: chunks are stored while documents are ingested, whatever the pipeline's cache believes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import BaseNode

from cachecraft_rag import CacheCraftEngine, EngineConfig, StoreConfig
from cachecraft_rag.store_config import DiskTierConfig
from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM, CacheCraftWarmer
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

TEXT = "\n\n".join(f"{number}. TERM\n\n{passage(number, 6)}" for number in range(1, 9)) + "\n"
DOCUMENTS = [Document(text=TEXT, id_="lease"), Document(text=passage(50, 10), id_="notice")]


def pipeline(llm: CacheCraftLLM, **fields: Any) -> IngestionPipeline:
    parser = CacheAlignedNodeParser.from_llm(llm, min_tokens=60, max_tokens=120)
    return IngestionPipeline(transformations=[parser, CacheCraftWarmer(llm, **fields)])


def stats(llm: CacheCraftLLM, nodes: list[BaseNode]) -> dict[str, Any]:
    return llm.complete(f"{nodes[1].get_content()}\n{nodes[3].get_content()}\nWhy?").raw["cachecraft"]


def test_the_first_prompt_finds_every_chunk(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm(namespace="tenant", auto_register=False)
    nodes = pipeline(llm).run(documents=DOCUMENTS)
    assert len(nodes) > 4
    assert (stats(llm, nodes)["chunk_hits"], stats(llm, nodes)["chunk_misses"]) == (2, 0)
    assert len(llm.engine.store) == len({node.get_content() for node in nodes})


async def test_an_async_pipeline_warms_too(llm: CacheCraftLLM) -> None:
    nodes = await pipeline(llm).arun(documents=DOCUMENTS)
    assert stats(llm, nodes)["chunk_hits"] == 2


def test_without_precomputing_chunks_are_only_known(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm(auto_register=False)
    nodes = pipeline(llm, precompute=False).run(documents=DOCUMENTS)
    assert len(llm.engine.store) == 0
    assert [stats(llm, nodes)[name] for name in ("chunk_misses", "chunk_hits")] == [2, 2]


def test_a_document_can_be_forgotten_by_its_id(llm: CacheCraftLLM) -> None:
    nodes = pipeline(llm).run(documents=DOCUMENTS)
    lease, others = (
        [n.get_content() for n in nodes if (n.ref_doc_id == "lease") == wanted] for wanted in (True, False)
    )
    assert min(len(lease), len(others)) > 0
    assert llm.engine.invalidate(document_ids=["lease"]) >= len(lease)  # with what was computed behind its chunks
    assert not any(llm.engine.is_stored(lease))
    assert llm.engine.register(others) == 0


def test_a_pipeline_with_a_cache_warms_again_when_chunks_are_gone(llm: CacheCraftLLM) -> None:
    run = pipeline(llm)
    nodes = run.run(documents=DOCUMENTS)
    same = run.transformations[1].to_dict()
    run.run(documents=DOCUMENTS)
    assert run.transformations[1].to_dict() == same  # nothing is gone, so the cache may skip it
    for texts in ([nodes[1].get_content()], None):
        num_gone = llm.engine.invalidate(texts)
        assert num_gone >= (1 if texts else len(nodes))
        assert len(llm.engine.store) == len(nodes) - num_gone
        run.run(documents=DOCUMENTS)
        assert len(llm.engine.store) == len(nodes)


def test_a_cache_from_another_process_does_not_leave_a_store_in_memory_cold(
    make_llm: Callable[..., CacheCraftLLM],
) -> None:
    run = pipeline(make_llm())
    nodes = run.run(documents=DOCUMENTS)
    llm = make_llm()
    again = pipeline(llm)
    again.cache = run.cache
    again.run(documents=DOCUMENTS)
    assert stats(llm, nodes)["chunk_hits"] == 2


def test_a_store_on_disk_is_warmed_once_for_all_processes(
    make_llm: Callable[..., CacheCraftLLM], tmp_path: Path
) -> None:
    def llm_at(path: Path) -> CacheCraftLLM:
        config = EngineConfig(store=StoreConfig(disk=DiskTierConfig(path=str(path))))
        return make_llm(engine=CacheCraftEngine(make("llama"), byte_level(), config))

    first = llm_at(tmp_path / "a")
    fingerprint = CacheCraftWarmer(first).fingerprint
    assert CacheCraftWarmer(llm_at(tmp_path / "a")).fingerprint == fingerprint
    assert CacheCraftWarmer(llm_at(tmp_path / "b")).fingerprint != fingerprint
    assert CacheCraftWarmer(make_llm(engine=first.engine, namespace="b")).fingerprint != fingerprint
    with torch.no_grad():
        first.engine.model.lm_head.weight += 0.5
    assert CacheCraftWarmer(first).fingerprint != fingerprint


def test_warm_tells_how_many_chunks_it_computed(llm: CacheCraftLLM) -> None:
    nodes = pipeline(llm).run(documents=DOCUMENTS)
    warmer = CacheCraftWarmer(llm)
    assert warmer.warm(nodes) == 0
    llm.engine.invalidate()
    assert warmer.warm(nodes) == len(nodes)
    assert warmer(nodes) is nodes


def test_it_refuses_to_warm_another_process(llm: CacheCraftLLM) -> None:
    with pytest.raises(TypeError, match="num_workers=1"):
        pickle.dumps(CacheCraftWarmer(llm))
    with pytest.raises(ValueError, match="llm: a str was given"):
        CacheCraftWarmer("llm")  # type: ignore[arg-type]
    assert sorted(CacheCraftWarmer(llm).to_dict()) == [
        "class_name",
        "fingerprint",
        "precompute",
        "show_progress",
        "static",
    ]
