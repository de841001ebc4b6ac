"""``CacheCraftRetriever``: a retriever that tells a model which chunks are on their way to it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, DocumentIdKey
from langchain_cachecraft.served_model import ServedModel


class CacheCraftRetriever(BaseRetriever):
    """Returns what another retriever returns, and registers it with the engine of one model.

    Not needed where retrieved texts register themselves. It is for models with ``auto_register=False``, and for
    ``prefetch``.

    Example:
        ```python
        from langchain_cachecraft import CacheCraftRetriever, ChatCacheCraft

        chat = ChatCacheCraft(model="Qwen/Qwen2.5-0.5B-Instruct")
        retriever = CacheCraftRetriever(retriever=store.as_retriever(), llm=chat, prefetch=True)
        chat.get_engine().invalidate(document_ids=["contracts/lease.pdf"])  # what its metadata call "source"
        ```
    """

    model_config = ConfigDict(extra="forbid")

    retriever: BaseRetriever = Field(description="Finds the documents.")
    llm: ServedModel = Field(description="The chat or text model that will read them; loaded at the first retrieval.")
    k: int | None = Field(
        default=None, ge=1, description="Most documents to return; None for as many as the retriever finds."
    )
    document_id_key: DocumentIdKey = Field(
        default=DOCUMENT_ID_KEYS,
        description="Where metadata name the document a chunk was cut from: the first of these keys that is there, or "
        "None for nowhere.",
    )
    prefetch: bool = Field(
        default=False, description="Whether stored KV begins to move from disk or remote into memory at once."
    )

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        documents = self.retriever.invoke(query, config, **kwargs, **self._count(k))
        return self._register(documents, k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        config: Any = {"callbacks": run_manager.get_child()}
        documents = await self.retriever.ainvoke(query, config, **kwargs, **self._count(k))
        return await asyncio.to_thread(self._register, documents, k)  # the first time, weights are loaded

    def _count(self, k: int | None) -> dict[str, int]:
        """How many documents the retriever is asked for; one that doesn't take this finds as many as it likes."""
        wanted = self.k if k is None else k
        return {} if wanted is None else {"k": wanted}

    def _register(self, documents: list[Document], k: int | None) -> list[Document]:
        documents = documents[: self._count(k).get("k")]
        self.llm.register_documents(documents, document_id_key=self.document_id_key, prefetch=self.prefetch)
        return documents
