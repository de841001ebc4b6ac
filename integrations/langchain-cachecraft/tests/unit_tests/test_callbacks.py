"""How retrieved texts get to the engines."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document

from cachecraft_rag import CacheCraftEngine, ChunkFeed
from langchain_cachecraft import CacheCraftCallbackHandler, ChatCacheCraft
from langchain_cachecraft.callbacks import RETRIEVED
from tests.conftest import passage


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
    handler = CacheCraftCallbackHandler(document_id_key="source")
    early, late = (Document(passage(number), metadata={"source": "lease.pdf"}) for number in (1, 2))
    other = Document(passage(3), metadata={"source": "other.pdf"})
    handler.on_retriever_end([early, other], run_id=uuid4())
    handler.feed.subscribe(engine, "a")
    handler.on_retriever_end([late, Document(passage(4))], run_id=uuid4())
    engine.warm([passage(number) for number in range(1, 5)], namespace="a")
    assert engine.invalidate(namespace="a", document_ids=["lease.pdf"]) == 2
    assert engine.register([passage(number) for number in range(1, 5)], "a") == 2


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
