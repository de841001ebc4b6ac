"""How retrieved texts get to the engines."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document

from cachecraft_rag import CacheCraftEngine
from langchain_cachecraft import CacheCraftCallbackHandler, ChatCacheCraft
from langchain_cachecraft.callbacks import RETRIEVED
from tests.conftest import passage


def knows(engine: CacheCraftEngine, text: str) -> bool:
    return engine.register([text]) == 0


def retrieve(handler: CacheCraftCallbackHandler, *texts: str) -> None:
    handler.on_retriever_end([Document(text) for text in texts], run_id=uuid4())


def test_a_subscriber_gets_what_is_retrieved(engine: CacheCraftEngine) -> None:
    handler = CacheCraftCallbackHandler()
    handler.subscribe(engine)
    retrieve(handler, passage(1), passage(2))
    assert knows(engine, passage(1))
    assert knows(engine, passage(2))
    assert not knows(engine, passage(3))


def test_a_late_subscriber_gets_the_latest_texts(engine: CacheCraftEngine) -> None:
    handler = CacheCraftCallbackHandler(max_texts=2)
    retrieve(handler, passage(1), passage(2))
    retrieve(handler, passage(1), passage(3))
    handler.subscribe(engine)
    assert knows(engine, passage(1))
    assert knows(engine, passage(3))
    assert not knows(engine, passage(2))


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
