"""How retrieved texts get to the engines."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage

from cachecraft_rag import CacheCraftEngine, ChunkFeed
from langchain_cachecraft import CacheAlignedTextSplitter, CacheCraftCallbackHandler, ChatCacheCraft
from langchain_cachecraft.callbacks import RETRIEVED
from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, texts_by_document
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level


def test_what_a_retriever_returns_is_registered_where_somebody_subscribed(engine: CacheCraftEngine) -> None:
    handler = CacheCraftCallbackHandler()
    handler.on_retriever_end([Document(passage(1))], run_id=uuid4())
    handler.feed.subscribe(engine, "a")
    handler.on_retriever_end([Document(passage(2)), Document(passage(3))], run_id=uuid4())
    assert engine.register([passage(number) for number in range(1, 5)], "a") == 1


def test_handlers_may_share_a_feed(engine: CacheCraftEngine) -> None:
    feed = ChunkFeed()
    feed.subscribe(engine)
    for number in (1, 2):
        CacheCraftCallbackHandler(feed).on_retriever_end([Document(passage(number))], run_id=uuid4())
    assert engine.register([passage(1), passage(2)]) == 0


def test_chunks_are_registered_with_the_document_they_are_of(engine: CacheCraftEngine) -> None:
    handler = CacheCraftCallbackHandler()
    early, late = (Document(passage(number), metadata={"source": "lease.pdf"}) for number in (1, 2))
    other = Document(passage(3), metadata={"source": "other.pdf"})
    handler.on_retriever_end([early, other], run_id=uuid4())
    handler.feed.subscribe(engine, "a")
    handler.on_retriever_end([late, Document(passage(4))], run_id=uuid4())
    for number in (3, 4, 1, 2):  # one by one: the others are not computed behind those of the lease
        engine.warm([passage(number)], namespace="a")
    assert engine.invalidate(namespace="a", document_ids=["lease.pdf"]) == 2
    assert engine.register([passage(number) for number in range(1, 5)], "a") == 2


@pytest.mark.parametrize(
    ("key", "metadata", "name"),
    [
        (DOCUMENT_ID_KEYS, {"id": 7}, "7"),
        (DOCUMENT_ID_KEYS, {"id": "7", "source": "lease.pdf"}, "lease.pdf"),
        (DOCUMENT_ID_KEYS, {"source": ""}, None),
        (DOCUMENT_ID_KEYS, {}, None),
        ("id", {"id": "7", "source": "lease.pdf"}, "7"),
        (None, {"source": "lease.pdf"}, None),
    ],
)
def test_a_document_has_the_name_that_its_metadata_give_it(key: Any, metadata: dict[str, Any], name: Any) -> None:
    assert texts_by_document([Document("a", metadata=metadata)], key) == {name: ["a"]}


def test_without_auto_register_no_feed_reaches_the_engine(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, auto_register=False, max_tokens=2)
    chat.get_engine()
    RETRIEVED.on_retriever_end([Document(passage(61))], run_id=uuid4())
    CacheAlignedTextSplitter.from_huggingface_tokenizer(byte_level()).create_documents([passage(62)])
    artifact = [Document(passage(63))]
    chat.invoke([HumanMessage("Why?"), ToolMessage("Found.", tool_call_id="1", artifact=artifact)])
    assert engine.register([passage(number) for number in (61, 62, 63)]) == 3


def test_with_auto_register_every_feed_reaches_the_engine(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=2)
    chat.get_engine()
    named = {"source": "lease.pdf"}
    RETRIEVED.on_retriever_end([Document(passage(61), metadata=named)], run_id=uuid4())
    splitter = CacheAlignedTextSplitter.from_huggingface_tokenizer(byte_level())
    splitter.create_documents([passage(62)], [named])
    artifact = [Document(passage(63), metadata=named)]
    chat.invoke([HumanMessage("Why?"), ToolMessage("Found.", tool_call_id="1", artifact=artifact)])
    texts = [passage(number) for number in (61, 62, 63)]
    assert engine.register(texts) == 0
    engine.warm(texts)
    assert engine.invalidate(document_ids=["lease.pdf"]) == 3


def test_a_broken_document_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    documents: Any = ["no document"]
    with caplog.at_level(logging.ERROR, logger="langchain_cachecraft"):
        CacheCraftCallbackHandler().on_retriever_end(documents, run_id=uuid4())
    assert "could not be registered" in caplog.text
    assert "AttributeError" in caplog.text


def test_the_first_chat_model_installs_the_handler_once_for_all_runs(model_folder: str) -> None:
    for _ in range(3):
        ChatCacheCraft(model=model_folder)
    handlers = CallbackManager.configure().handlers
    assert [handler for handler in handlers if isinstance(handler, CacheCraftCallbackHandler)] == [RETRIEVED]
