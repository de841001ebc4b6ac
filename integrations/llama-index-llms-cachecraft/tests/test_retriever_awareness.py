"""Chunks are recognised and reused in every pipeline of LlamaIndex, without any wiring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, PromptHelper, Settings, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.tools import RetrieverTool

from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM, CacheCraftSpanHandler, instrumentation
from tests.conftest import passage

Stats = list[dict[str, Any]]

NUM_CHUNKS = 3  # of the fixture ``retriever``


def assert_reused(first: Stats, second: Stats, num_chunks: int = NUM_CHUNKS) -> None:
    """Every chunk of the first round was new, and every one of the second came from the store."""
    assert sum(stats["chunk_hits"] + stats["chunk_misses"] for stats in first) >= num_chunks
    assert sum(stats["chunk_misses"] for stats in first) == num_chunks
    assert sum(stats["chunk_hits"] for stats in second) >= num_chunks
    assert sum(stats["chunk_misses"] for stats in second) == 0
    assert all(stats["reused_tokens"] > 0 for stats in second if stats["chunk_hits"])


def assert_read_as_written(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    """The ids that the model read are the prompt's text, and the spans are the chunks' texts."""
    assert read
    for prompt in read:
        assert llm.engine.prompts.decode(prompt.token_ids) == prompt.text
        for span in prompt.spans:
            assert llm.engine.prompts.decode(prompt.token_ids[span.start : span.end]) == span.text


MODES = (
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
    ResponseMode.SIMPLE_SUMMARIZE,
)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("has_template", [True, False], ids=["chat", "plain"])
def test_a_query_engine_reuses_every_chunk(
    mode: ResponseMode,
    has_template: bool,
    make_llm: Callable[..., CacheCraftLLM],
    record: Callable[[CacheCraftLLM], list[EncodedPrompt]],
    retriever: Any,
    log: Any,
) -> None:
    llm = make_llm(chat_template=has_template)
    read = record(llm)
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    engine.query("What ends first?")
    first = log.take_stats()
    retriever.nodes.reverse()
    engine.query("Who signs?")
    assert_reused(first, log.take_stats())
    assert_read_as_written(llm, read)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
async def test_an_async_query_engine_reuses_every_chunk(
    mode: ResponseMode, llm: CacheCraftLLM, retriever: Any, log: Any
) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    await engine.aquery("What ends first?")
    first = log.take_stats()
    retriever.nodes.reverse()
    await engine.aquery("Who signs?")
    assert_reused(first, log.take_stats())


async def test_streaming_query_engines_reuse_every_chunk(llm: CacheCraftLLM, retriever: Any, log: Any) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    response = engine.query("What ends first?")
    assert isinstance(response, StreamingResponse)
    assert "".join(response.response_gen)
    first = log.take_stats()
    response = await engine.aquery("Who signs?")
    assert isinstance(response, AsyncStreamingResponse)
    assert "".join([delta async for delta in response.async_response_gen()])
    assert_reused(first, log.take_stats())


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine], ids=lambda kind: kind.__name__)
def test_a_chat_engine_reuses_every_chunk(
    kind: Any, llm: CacheCraftLLM, read: list[EncodedPrompt], retriever: Any, log: Any
) -> None:
    engine = kind.from_defaults(retriever, llm=llm)
    engine.chat("What ends first?")
    first = log.take_stats()
    retriever.nodes.reverse()
    engine.chat("Who signs?")
    assert_reused(first, log.take_stats())
    assert_read_as_written(llm, read)


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine], ids=lambda kind: kind.__name__)
async def test_async_and_streaming_chat_engines_reuse_every_chunk(
    kind: Any, llm: CacheCraftLLM, retriever: Any, log: Any
) -> None:
    engine = kind.from_defaults(retriever, llm=llm)
    await engine.achat("What ends first?")
    first = log.take_stats()
    assert list(engine.stream_chat("Who signs?").response_gen)
    second = log.take_stats()
    stream = await engine.astream_chat("When?")
    assert [delta async for delta in stream.async_response_gen()]
    assert_reused(first, second)
    assert_reused(first, log.take_stats())


def test_a_citation_query_engine_reuses_chunks_whatever_number_they_get(
    llm: CacheCraftLLM, read: list[EncodedPrompt], retriever: Any, log: Any
) -> None:
    engine = CitationQueryEngine(retriever, llm=llm)
    engine.query("What ends first?")
    first = log.take_stats()
    retriever.nodes.reverse()
    engine.query("Who signs?")
    assert "Source 1:" in read[-1].text
    assert_reused(first, log.take_stats())
    assert_read_as_written(llm, read)


def test_nodes_that_citation_splits_are_reused_piece_by_piece(
    llm: CacheCraftLLM, read: list[EncodedPrompt], retriever: Any, log: Any
) -> None:
    engine = CitationQueryEngine(retriever, llm=llm, citation_chunk_size=60, citation_chunk_overlap=0)
    engine.query("What ends first?")
    first = log.take_stats()
    engine.query("Who signs?")
    num_pieces = first[0]["chunk_misses"]
    assert num_pieces > NUM_CHUNKS
    assert_reused(first, log.take_stats(), num_pieces)
    assert_read_as_written(llm, read)


async def test_nodes_that_a_postprocessor_rewrites_are_reused(
    llm: CacheCraftLLM, read: list[EncodedPrompt], retriever: Any, make_retriever: Callable[..., Any], log: Any
) -> None:
    windows = [node.text for node in retriever.nodes]
    sentences = [TextNode(text=window[:90], metadata={"window": window}) for window in windows]
    for sentence in sentences:
        sentence.excluded_llm_metadata_keys = ["window"]
    replace = MetadataReplacementPostProcessor(target_metadata_key="window")
    engine = RetrieverQueryEngine.from_args(make_retriever(sentences), llm=llm, node_postprocessors=[replace])
    engine.query("What ends first?")
    first = log.take_stats()
    await engine.aquery("Who signs?")
    assert_reused(first, log.take_stats())
    assert [span.text for span in read[-1].spans] == [window.strip() for window in windows]


async def test_a_synthesizer_by_itself_makes_its_nodes_known(llm: CacheCraftLLM, retriever: Any, log: Any) -> None:
    nodes = [NodeWithScore(node=node, score=1.0) for node in retriever.nodes]
    synthesizer = get_response_synthesizer(llm=llm)
    synthesizer.synthesize("What ends first?", nodes)
    first = log.take_stats()
    await synthesizer.asynthesize("Who signs?", nodes=nodes)
    assert_reused(first, log.take_stats())


def test_changed_metadata_does_not_cost_a_chunk(
    llm: CacheCraftLLM, read: list[EncodedPrompt], retriever: Any, log: Any
) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
    engine.query("What ends first?")
    first = log.take_stats()
    for node in retriever.nodes:
        node.metadata["page_label"] = f"100{node.metadata['page_label']}"
    engine.query("What ends first?")
    assert "page_label: 1002" in read[-1].text
    assert_reused(first, log.take_stats())


def test_a_prompt_built_by_hand_from_a_retriever_reuses_every_chunk(llm: CacheCraftLLM, retriever: Any) -> None:
    def ask(question: str) -> dict[str, Any]:
        passages = "\n###\n".join(found.node.get_content() for found in retriever.retrieve(question))
        return llm.chat([ChatMessage(content=f"{passages}\n{question}")]).raw["cachecraft"]

    assert ask("Why?")["chunk_misses"] == 3
    assert ask("How?")["chunk_hits"] == 3


async def test_the_output_of_a_retriever_tool_is_reused(llm: CacheCraftLLM, retriever: Any) -> None:
    tool = RetrieverTool.from_defaults(retriever)

    async def ask(question: str) -> dict[str, Any]:
        output = await tool.acall(question)
        messages = [ChatMessage(content=question), ChatMessage(role="tool", content=output.content)]
        return (await llm.achat(messages)).raw["cachecraft"]

    assert (await ask("Why?"))["chunk_misses"] == 3
    assert (await ask("How?"))["chunk_hits"] == 3


def test_the_settings_object_is_all_that_changes(
    llm: CacheCraftLLM, retriever: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_llm", "_embed_model", "_prompt_helper"):
        monkeypatch.setattr(Settings, name, None)
    Settings.llm = llm
    Settings.embed_model = MockEmbedding(embed_dim=8)
    index = VectorStoreIndex.from_documents([Document(text=node.text) for node in retriever.nodes])
    engine = index.as_query_engine(similarity_top_k=3)
    assert str(engine.query("What ends first?"))
    first = log.take_stats()
    assert str(engine.query("Who signs?"))
    assert_reused(first, log.take_stats())


def test_without_auto_register_nothing_is_recognised(
    make_llm: Callable[..., CacheCraftLLM], retriever: Any, log: Any
) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=make_llm(auto_register=False))
    engine.query("What ends first?")
    engine.query("Who signs?")
    assert {stats["fallback_reason"] for stats in log.take_stats()} == {"no known chunk in the prompt"}


def of_document(text: str, document: str) -> TextNode:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return TextNode(text=text, relationships=source)


@pytest.mark.parametrize("auto_register", [True, False])
@pytest.mark.parametrize("feed", ["synthesizer", "retriever", "node parser"])
def test_every_feed_names_documents_and_is_off_without_auto_register(
    make_llm: Callable[..., CacheCraftLLM], make_retriever: Callable[..., Any], feed: str, auto_register: bool
) -> None:
    llm = make_llm(auto_register=auto_register, namespace=f"{feed} {auto_register}")
    engine, text = llm.engine, f"About the {feed}: {passage(31)}"
    if feed == "synthesizer":
        get_response_synthesizer(llm=llm).synthesize("Why?", [NodeWithScore(node=of_document(text, "lease"))])
    elif feed == "retriever":
        make_retriever([of_document(text, "lease")]).retrieve("Why?")
    else:
        CacheAlignedNodeParser.from_llm(llm)([Document(text=text, id_="lease")])
    assert engine.register([text], llm.namespace) == (not auto_register)
    engine.warm([text], namespace=llm.namespace)
    assert engine.invalidate(namespace=llm.namespace, document_ids=["lease"]) == auto_register


def test_a_node_that_the_prompt_helper_cuts_is_reused_in_pieces(
    make_llm: Callable[..., CacheCraftLLM], make_retriever: Callable[..., Any], log: Any
) -> None:
    llm = make_llm(context_window=900)
    nodes = [TextNode(text=" ".join(passage(number) for number in range(first, first + 3))) for first in (40, 50)]
    llm.engine.warm([node.text for node in nodes], namespace=llm.namespace)
    helper = PromptHelper(900, 64, chunk_overlap_ratio=0.0, tokenizer=llm.tokenize)
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=ResponseMode.COMPACT)
    synthesizer.synthesize("What ends first?", [NodeWithScore(node=node) for node in nodes])
    stats = log.take_stats()
    assert len(stats) > 1
    assert sum(stat["chunk_hits"] for stat in stats) > len(nodes)
    assert sum(stat["chunk_misses"] for stat in stats) == 0


def test_chunks_seen_before_the_model_is_loaded_are_recognised_afterwards(tiny_folder: str, retriever: Any) -> None:
    llm = CacheCraftLLM(model=tiny_folder, max_new_tokens=2)
    retriever.retrieve("What ends first?")
    assert not llm.is_loaded
    assert llm.complete(f"{retriever.nodes[0].text}\nWhy?").raw["cachecraft"]["chunk_misses"] == 1
    llm.close()


def test_the_span_handler_is_installed_once(make_llm: Callable[..., CacheCraftLLM]) -> None:
    make_llm()
    make_llm()
    handlers = [h for h in get_dispatcher().span_handlers if isinstance(h, CacheCraftSpanHandler)]
    assert len(handlers) == 1
    assert not handlers[0].open_spans


def test_a_failure_to_register_is_logged_and_the_query_goes_on(
    llm: CacheCraftLLM, retriever: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> int:
        raise RuntimeError("registry is broken")

    monkeypatch.setattr(instrumentation.CHUNKS, "add", broken)
    with caplog.at_level(logging.ERROR, logger="llama_index.llms.cachecraft"):
        response = get_response_synthesizer(llm=llm).synthesize("Why?", retriever.retrieve("Why?"))
    assert str(response)
    assert "registry is broken" in caplog.text
