"""The retriever wrapper: LangChain's own tests for retrievers, and what the model's engine gets to know."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests

from cachecraft_rag import CacheCraftEngine
from langchain_cachecraft import CacheCraftLLM, CacheCraftRetriever, ChatCacheCraft
from tests.conftest import passage


def store_retriever(**fields: Any) -> Any:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
    store.add_documents(
        [Document(passage(number), metadata={"source": f"{number % 2}.pdf"}) for number in range(71, 77)]
    )
    return store.as_retriever(**fields)


class TestCacheCraftRetriever(RetrieversIntegrationTests):
    folder = ""

    @pytest.fixture(autouse=True)
    def _folder(self, model_folder: str) -> None:
        type(self).folder = model_folder

    @property
    def retriever_constructor(self) -> type[CacheCraftRetriever]:
        return CacheCraftRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": store_retriever(), "llm": ChatCacheCraft(model=self.folder)}

    @property
    def retriever_query_example(self) -> str:
        return "What ends first?"


@pytest.fixture
def chat(engine: CacheCraftEngine) -> ChatCacheCraft:
    return ChatCacheCraft(engine=engine, auto_register=False, namespace="a", max_tokens=2)


async def test_what_is_retrieved_is_known_to_the_model_and_to_no_other_namespace(
    chat: ChatCacheCraft, engine: CacheCraftEngine
) -> None:
    retriever = CacheCraftRetriever(retriever=store_retriever(), llm=chat, k=2)
    found = [*retriever.invoke("ends"), *await retriever.ainvoke("begins")]
    texts = [document.page_content for document in found]
    assert engine.register(texts, "a") == 0
    assert engine.register(texts, "b") == len(set(texts))


@pytest.mark.parametrize("kind", [ChatCacheCraft, CacheCraftLLM])
def test_documents_are_invalidated_by_what_their_metadata_call_them(engine: CacheCraftEngine, kind: Any) -> None:
    llm = kind(engine=engine, auto_register=False, max_tokens=2)
    documents = CacheCraftRetriever(retriever=store_retriever(), llm=llm, k=6).invoke("ends")
    llm.invoke("\n\n".join(document.page_content for document in documents))
    names = ("0.pdf", "1.pdf")
    texts = {name: [one.page_content for one in documents if one.metadata["source"] == name] for name in names}
    assert [sum(engine.is_stored(texts[name])) for name in names] == [3, 3]
    assert engine.invalidate(document_ids=["1.pdf"]) >= 3  # with what was computed behind its chunks
    assert not any(engine.is_stored(texts["1.pdf"]))
    assert engine.register(texts["0.pdf"]) == 0
    assert engine.register(texts["1.pdf"]) == 3


def test_without_a_key_documents_have_no_name(chat: ChatCacheCraft, engine: CacheCraftEngine) -> None:
    retriever = CacheCraftRetriever(retriever=store_retriever(), llm=chat, k=6, document_id_key=None)
    documents = retriever.invoke("ends")
    chat.invoke("\n\n".join(document.page_content for document in documents))
    assert engine.invalidate(namespace="a", document_ids=["0.pdf", "1.pdf"]) == 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_stored_chunks_are_loaded_while_the_prompt_is_made(
    chat: ChatCacheCraft, engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch, prefetch: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(engine, "prefetch", lambda texts, namespace: asked.append((list(texts), namespace)))
    (document,) = CacheCraftRetriever(retriever=store_retriever(), llm=chat, k=1, prefetch=prefetch).invoke("ends")
    assert asked == [([document.page_content], "a")] * prefetch


def test_the_other_retriever_is_a_run_of_its_own_under_this_one(chat: ChatCacheCraft) -> None:
    parents: list[Any] = []

    class Handler(BaseCallbackHandler):
        def on_retriever_start(self, *args: Any, parent_run_id: Any = None, **kwargs: Any) -> None:
            parents.append(parent_run_id)

    CacheCraftRetriever(retriever=store_retriever(), llm=chat).invoke("ends", {"callbacks": [Handler()]})
    assert [parent is None for parent in parents] == [True, False]


def test_a_bad_field_is_refused_by_name(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match="k"):
        CacheCraftRetriever(retriever=store_retriever(), llm=chat, k=0)
