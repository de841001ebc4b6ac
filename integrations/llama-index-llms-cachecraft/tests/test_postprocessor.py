"""``CacheCraftPostprocessor``: nodes are announced with their documents, and reordered only when asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from llama_index.llms.cachecraft import CacheCraftLLM, CacheCraftPostprocessor, CacheCraftPrefillEvent
from tests.conftest import passage


def scored(scores: list[float | None]) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=passage(number), id_=str(number)), score=score)
        for number, score in enumerate(scores)
    ]


def order(nodes: list[NodeWithScore]) -> list[int]:
    return [int(node.node.node_id) for node in nodes]


async def test_nodes_are_announced_without_auto_register(
    make_llm: Callable[..., CacheCraftLLM], retriever: Any, log: Any
) -> None:
    llm = make_llm(auto_register=False, namespace="tenant")
    post = [CacheCraftPostprocessor(llm)]
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=post)
    engine.query("What ends first?")
    await engine.aquery("Who signs?")
    first, second = [event.stats for event in log.of(CacheCraftPrefillEvent)]
    assert (first["chunk_misses"], second["chunk_hits"]) == (3, 3)


def test_a_document_can_be_forgotten_by_its_id(make_llm: Callable[..., CacheCraftLLM], log: Any) -> None:
    llm = make_llm(auto_register=False)
    nodes = scored([1.0, 1.0])
    nodes[1].node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="lease")
    CacheCraftPostprocessor(llm).postprocess_nodes(nodes)
    prompt = f"{passage(0)}\n{passage(1)}\nWhy?"
    assert llm.complete(prompt).raw["cachecraft"]["chunk_misses"] == 2
    assert llm.engine.invalidate(document_ids=["lease"]) == 2  # and the other, which was computed behind it
    assert llm.engine.register([passage(0)]) == 0
    assert llm.engine.register([passage(1)]) == 1


def test_the_order_is_kept_unless_asked_for(llm: CacheCraftLLM) -> None:
    nodes = scored([1.0, 1.0, 1.0, 0.5])
    llm.engine.warm([passage(2)])
    assert CacheCraftPostprocessor(llm).postprocess_nodes(nodes) == nodes


def test_only_equally_relevant_nodes_change_places_and_stored_ones_come_first(llm: CacheCraftLLM) -> None:
    llm.engine.warm([passage(number) for number in (1, 4, 6)])
    nodes = scored([0.9, 0.9, 0.5, 0.5, 0.5, None, None])
    assert order(CacheCraftPostprocessor(llm, reorder=True).postprocess_nodes(nodes))[:3] == [1, 0, 4]
    assert order(CacheCraftPostprocessor(llm, reorder=True).postprocess_nodes(nodes))[5:] == [6, 5]
    close = scored([0.90, 0.88, 0.70])
    assert order(CacheCraftPostprocessor(llm, reorder=True, tolerance=0.05).postprocess_nodes(close)) == [1, 0, 2]
    assert order(CacheCraftPostprocessor(llm, reorder=True, tolerance=0.01).postprocess_nodes(close)) == [0, 1, 2]


def test_the_order_of_equals_does_not_depend_on_the_order_they_come_in(llm: CacheCraftLLM) -> None:
    post = CacheCraftPostprocessor(llm, reorder=True)
    nodes = scored([1.0] * 6)
    assert order(post.postprocess_nodes(nodes)) == order(post.postprocess_nodes(nodes[::-1]))


def test_prompts_that_begin_alike_are_exact(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm(recompute_ratio=1.0)
    post = CacheCraftPostprocessor(llm, reorder=True)

    def ask(nodes: list[NodeWithScore]) -> dict[str, Any]:
        texts = [node.node.get_content() for node in post.postprocess_nodes(nodes)]
        return llm.complete("\n\n".join(texts) + "\n\nWhy?").raw["cachecraft"]

    nodes = scored([1.0] * 4)
    assert ask(nodes[:3])["recomputed_tokens"] == 0
    stats = ask([nodes[3], nodes[2], nodes[0], nodes[1]])
    assert (stats["chunk_hits"], stats["recomputed_tokens"]) == (3, 0)


def test_wrong_arguments_are_refused_by_name(llm: CacheCraftLLM) -> None:
    with pytest.raises(ValueError, match="llm: a str was given; give a CacheCraftLLM"):
        CacheCraftPostprocessor("llm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tolerance"):
        CacheCraftPostprocessor(llm, tolerance=-1.0)
    assert CacheCraftPostprocessor(llm).to_dict() == {
        "reorder": False,
        "tolerance": 0.0,
        "class_name": "CacheCraftPostprocessor",
    }
