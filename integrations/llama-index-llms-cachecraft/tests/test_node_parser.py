"""``CacheAlignedNodeParser``: exact slices, sizes by the model's tokenizer, and what LlamaIndex makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, TextNode

from cachecraft_rag import ChunkSplitter
from cachecraft_rag.headings import Preset
from cachecraft_rag.prompt import PromptEncoder
from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level, metaspace

SIZES = {"min_tokens": 60, "max_tokens": 120}
TEXT = "\n\n".join(f"{number}. TERM\n\n{passage(number, 6)}" for number in range(1, 25)) + "\n"


@pytest.fixture
def parser() -> CacheAlignedNodeParser:
    return CacheAlignedNodeParser.from_tokenizer(byte_level(), **SIZES)


def parse(parser: CacheAlignedNodeParser, text: str = TEXT, **options: Any) -> list[TextNode]:
    nodes = parser.get_nodes_from_documents([Document(text=text, id_="contract", **options)])
    assert all(isinstance(node, TextNode) for node in nodes)
    return nodes


def token_counts(nodes: Sequence[BaseNode]) -> list[int]:
    return [node.metadata["cachecraft_tokens"] for node in nodes]


def test_nodes_are_exact_slices_that_join_to_the_document(parser: CacheAlignedNodeParser) -> None:
    nodes = parse(parser)
    assert len(nodes) > 10
    assert "".join(node.text for node in nodes) == TEXT
    for node in nodes:
        assert TEXT[node.start_char_idx : node.end_char_idx] == node.text


def test_text_that_repeats_has_its_own_place(parser: CacheAlignedNodeParser) -> None:
    text = f"{passage(1, 4)}\n\n" * 12
    nodes = parse(parser, text)
    assert [node.start_char_idx for node in nodes[1:]] == [node.end_char_idx for node in nodes[:-1]]
    assert nodes[0].start_char_idx == 0
    assert nodes[-1].end_char_idx == len(text)


def test_sizes_are_counted_by_the_tokenizer(parser: CacheAlignedNodeParser) -> None:
    prompts = PromptEncoder(byte_level())
    nodes = parse(parser)
    for node in nodes:
        assert node.metadata["cachecraft_tokens"] == len(prompts.encode_chunk(node.text.strip()))
        assert node.metadata["cachecraft_tokens"] <= 120
    in_band = [node for node in nodes if node.metadata["cachecraft_tokens"] >= 55]
    assert len(in_band) > 0.8 * len(nodes)


def test_the_count_is_hidden_from_llm_and_embedding(parser: CacheAlignedNodeParser) -> None:
    node = parse(parser, metadata={"file_name": "lease.md", "secret": "x"}, excluded_llm_metadata_keys=["secret"])[0]
    assert node.metadata["file_name"] == "lease.md"
    assert node.get_content(MetadataMode.LLM) == f"file_name: lease.md\n\n{node.text.strip()}"
    assert "cachecraft" not in node.get_content(MetadataMode.EMBED)
    assert node.excluded_llm_metadata_keys == ["secret", "cachecraft_tokens", "breadcrumb"]


def test_the_embedding_reads_the_headings_and_the_llm_does_not(parser: CacheAlignedNodeParser) -> None:
    text = f"ARTICLE 5\n\nFEES\n\n5.1 Rent. {passage(1, 8)}\n\n5.2 Late payment. {passage(2, 8)}"
    node = parse(parser, text)[-1]
    assert node.metadata["breadcrumb"] == "ARTICLE 5 FEES > 5.2 Late payment"
    assert node.get_content(MetadataMode.LLM) == node.text.strip()
    assert node.get_content(MetadataMode.EMBED).startswith("breadcrumb: ARTICLE 5 FEES > 5.2 Late payment\n")
    renamed = parse(parser, text.replace("FEES", "CHARGES"))[-1]
    assert renamed.metadata["breadcrumb"] == "ARTICLE 5 CHARGES > 5.2 Late payment"
    assert (renamed.node_id, renamed.text) == (node.node_id, node.text)


def test_the_key_of_the_headings_can_be_named_and_left_out() -> None:
    def first(key: str | None, **options: Any) -> TextNode:
        parser = CacheAlignedNodeParser.from_tokenizer(byte_level(), breadcrumb_key=key, **SIZES)
        return parse(parser, **options)[0]

    assert first("section").metadata.keys() == {"section", "cachecraft_tokens"}
    assert first(None).metadata.keys() == {"cachecraft_tokens"}
    own = first("breadcrumb", metadata={"breadcrumb": "home"})
    assert own.get_content(MetadataMode.LLM).startswith("breadcrumb: home\n")


@pytest.mark.parametrize(("preset", "headings"), [("contract", "1 TERM"), ("markdown", None), ("plain", None)])
def test_a_preset_says_which_headings_are_known(preset: Preset, headings: str | None) -> None:
    parser = CacheAlignedNodeParser.from_tokenizer(byte_level(), preset=preset, **SIZES)
    nodes = parse(parser)
    assert nodes[0].metadata.get("breadcrumb") == headings
    expected = ChunkSplitter.from_tokenizer(byte_level(), preset=preset, **SIZES).split(TEXT)
    assert [node.text for node in nodes] == expected


def test_metadata_does_not_move_boundaries(parser: CacheAlignedNodeParser) -> None:
    with_metadata = parse(parser, metadata={"summary": "long " * 50})
    assert [node.text for node in with_metadata] == [node.text for node in parse(parser)]


def test_ids_follow_from_document_and_text(parser: CacheAlignedNodeParser) -> None:
    ids = [node.node_id for node in parse(parser)]
    assert ids == [node.node_id for node in parse(parser, metadata={"a": "b"})]
    assert len(set(ids)) == len(ids)
    edited = {node.node_id for node in parse(parser, TEXT.replace("12. TERM", "12. TERM AND NOTICE"))}
    assert 0 < len(set(ids) - edited) < len(ids) / 2
    other = parser.get_nodes_from_documents([Document(text=TEXT, id_="other")])
    assert set(ids).isdisjoint(node.node_id for node in other)


def test_repeated_text_gets_ids_of_its_own(parser: CacheAlignedNodeParser) -> None:
    nodes = parse(parser, f"{passage(1, 4)}\n\n" * 12)
    assert len({node.text for node in nodes}) < len(nodes)
    assert len({node.node_id for node in nodes}) == len(nodes)


def test_an_id_function_of_the_user_is_used() -> None:
    parser = CacheAlignedNodeParser.from_tokenizer(byte_level(), id_func=lambda i, doc: f"{doc.node_id}-{i}", **SIZES)
    assert [node.node_id for node in parse(parser)][:2] == ["contract-0", "contract-1"]
    random = CacheAlignedNodeParser.from_tokenizer(byte_level(), stable_ids=False, **SIZES)
    assert parse(random)[0].node_id != parse(random)[0].node_id


def test_nodes_are_linked(parser: CacheAlignedNodeParser) -> None:
    first, second, *_ = parse(parser)
    assert first.relationships[NodeRelationship.NEXT].node_id == second.node_id
    assert second.relationships[NodeRelationship.SOURCE].node_id == "contract"


def test_empty_and_blank_documents_have_no_nodes(parser: CacheAlignedNodeParser) -> None:
    assert parse(parser, "") == []
    assert parse(parser, " \n\n ") == []


def test_it_runs_in_an_ingestion_pipeline_whose_cache_knows_its_settings(parser: CacheAlignedNodeParser) -> None:
    pipeline = IngestionPipeline(transformations=[parser])
    documents = [Document(text=TEXT, id_="contract")]
    nodes = pipeline.run(documents=documents)
    assert [node.node_id for node in nodes] == [node.node_id for node in parse(parser)]
    smaller = CacheAlignedNodeParser.from_tokenizer(byte_level(), min_tokens=30, max_tokens=60)
    other = CacheAlignedNodeParser.from_tokenizer(metaspace(), **SIZES)
    for changed in (smaller, other):
        assert changed.to_dict() != parser.to_dict()
        pipeline.transformations = [changed]
        assert token_counts(pipeline.run(documents=documents)) != token_counts(nodes)


def test_citations_can_use_it(parser: CacheAlignedNodeParser, llm: CacheCraftLLM) -> None:
    index = VectorStoreIndex(parse(parser), embed_model=MockEmbedding(embed_dim=8))
    engine = CitationQueryEngine.from_args(index, llm=llm, text_splitter=parser, similarity_top_k=2)
    response = engine.query("What ends first?")
    assert [found.node.get_content().startswith("Source") for found in response.source_nodes] == [True, True]


def test_chunks_of_parsed_documents_are_recognised_in_prompts(
    llm: CacheCraftLLM, parser: CacheAlignedNodeParser
) -> None:
    nodes = parse(parser)
    stats = llm.complete(f"{nodes[2].text}{nodes[5].text}\nWhat ends first?").raw["cachecraft"]
    assert stats["chunk_misses"] == 2


def test_a_parsed_document_can_be_forgotten_by_its_id(llm: CacheCraftLLM, parser: CacheAlignedNodeParser) -> None:
    assert llm.engine.invalidate(document_ids=["contract"]) == 0
    text = parse(parser)[2].text
    assert llm.complete(f"{text}\nWhy?").raw["cachecraft"]["chunk_misses"] == 1
    assert llm.engine.invalidate(document_ids=["contract"]) == 1


def test_it_takes_the_tokenizer_of_an_llm(
    make_llm: Callable[..., CacheCraftLLM], tiny_folder: str, parser: CacheAlignedNodeParser
) -> None:
    expected = [node.text for node in parse(parser)]
    assert [node.text for node in parse(CacheAlignedNodeParser.from_llm(make_llm(), **SIZES))] == expected
    named = CacheCraftLLM(model=tiny_folder)
    assert [node.text for node in parse(CacheAlignedNodeParser.from_llm(named, **SIZES))] == expected
    assert not named.is_loaded
    assert [node.text for node in parse(CacheAlignedNodeParser(model=tiny_folder, **SIZES))] == expected


def test_a_copy_with_other_sizes_splits_otherwise(parser: CacheAlignedNodeParser) -> None:
    before = parse(parser)
    smaller = parser.model_copy(update={"min_tokens": 30, "max_tokens": 60})
    assert len(parse(smaller)) > len(before)
    assert [node.text for node in parse(parser)] == [node.text for node in before]


def test_it_can_be_pickled_with_the_tokenizer_it_was_given(parser: CacheAlignedNodeParser) -> None:
    expected = [node.text for node in parse(parser)]
    restored = pickle.loads(pickle.dumps(parser))
    assert restored.to_dict() == parser.to_dict()
    assert [node.text for node in parse(restored)] == expected
    assert [node.text for node in parse(parser)] == expected


def test_a_dictionary_without_a_tokenizer_says_what_is_missing(
    parser: CacheAlignedNodeParser, tiny_folder: str
) -> None:
    data = parser.to_dict()
    data.pop("id_func")
    with pytest.raises(ValueError, match="model: '' names no tokenizer"):
        parse(CacheAlignedNodeParser.from_dict(data))
    assert parse(CacheAlignedNodeParser.from_dict(data, model=tiny_folder))
    with pytest.raises(ValueError, match="has another tokenizer"):
        parse(CacheAlignedNodeParser.from_dict(data, model=tiny_folder, tokenizer_fingerprint="other"))


def test_wrong_settings_are_refused_by_name() -> None:
    tokenizer = byte_level()
    for fields, message in [
        ({"min_tokens": 100, "max_tokens": 100}, "max_tokens"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"region_tokens": 600}, "region_tokens"),
        ({"preset": "novel"}, "preset"),
        ({"min_token": 3}, "min_token"),
        ({"breadcrumb_key": ""}, "breadcrumb_key"),
    ]:
        with pytest.raises(ValueError, match=message):
            CacheAlignedNodeParser.from_tokenizer(tokenizer, **fields)
    with pytest.raises(ValueError, match="model: '' names no tokenizer"):
        CacheAlignedNodeParser()
    with pytest.raises(ValueError, match="tokenizer: int has no encode"):
        CacheAlignedNodeParser.from_tokenizer(7)
