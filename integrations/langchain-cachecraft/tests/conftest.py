"""Tiny models with real tokenizers, in folders as a user would name them, and engines made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

ChatMaker = Callable[..., ChatCacheCraft]
RetrieverMaker = Callable[..., BaseRetriever]


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))  # tiny tensors: more threads only wait for each other


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny Llama."""
    return _save(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model of another architecture."""
    return _save(tmp_path_factory.mktemp("tiny-qwen"), "qwen2")


@pytest.fixture
def make_chat(model_folder: str) -> Iterator[ChatMaker]:
    """Make chat models on the tiny Llama, which share an engine: ``make_chat(recompute_ratio=1.0)``."""
    chats: list[ChatCacheCraft] = []

    def maker(**fields: Any) -> ChatCacheCraft:
        chats.append(ChatCacheCraft(**{"model": model_folder, "max_tokens": 12, **fields}))
        return chats[-1]

    yield maker
    for chat in chats:
        chat.close()


@pytest.fixture
def engine() -> Iterator[CacheCraftEngine]:
    """A ready engine."""
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=12)) as engine:
        yield engine


@pytest.fixture
def make_retriever() -> RetrieverMaker:
    """Make a vector store retriever over some passages that returns all of them, in an order given by the question."""

    def maker(*numbers: int) -> BaseRetriever:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents([Document(passage(number), metadata={"number": number}) for number in numbers])
        return store.as_retriever(search_kwargs={"k": len(numbers)})

    return maker


def _save(folder: Path, name: str) -> str:
    make(name).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return str(folder)
