"""``CacheCraftMiddleware``: what the tools of an agent return is known before the model reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ToolMessage

from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, DocumentIdKey
from langchain_cachecraft.messages import artifact_documents
from langchain_cachecraft.served_model import ServedModel


class CacheCraftMiddleware(AgentMiddleware[Any, Any, Any]):
    """Registers what an agent's tools return, and has its stored KV loaded while the agent goes on.

    Every model call of an agent carries the results of all earlier tool calls. The documents in the ``artifact`` of a
    tool message are chunks; a tool message without any is a chunk as a whole.

    Args:
        llm: The model of the agent; loaded when the first tool returns.
        document_id_key: Where metadata name the document a chunk was cut from: the first of these keys that is there,
            or ``None`` for nowhere.
        prefetch: Whether stored KV begins to move from disk or remote into memory when a tool returns.

    Example:
        ```python
        from langchain.agents import create_agent
        from langchain_cachecraft import CacheCraftMiddleware, ChatCacheCraft

        chat = ChatCacheCraft(model="Qwen/Qwen2.5-0.5B-Instruct")
        agent = create_agent(chat, [search], middleware=[CacheCraftMiddleware(chat)])
        ```
    """

    def __init__(
        self, llm: ServedModel, *, document_id_key: DocumentIdKey = DOCUMENT_ID_KEYS, prefetch: bool = True
    ) -> None:
        super().__init__()
        self.llm, self.document_id_key, self.prefetch = llm, document_id_key, prefetch

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Register the tool messages of the chat, those of an earlier process included."""
        self._register(request.messages, prefetch=False)
        return handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As ``wrap_model_call``."""
        await asyncio.to_thread(self._register, request.messages, prefetch=False)
        return await handler(request)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Register what a tool returns, and begin to load it."""
        result = handler(request)
        self._register([result], prefetch=self.prefetch)
        return result

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """As ``wrap_tool_call``."""
        result = await handler(request)
        await asyncio.to_thread(self._register, [result], prefetch=self.prefetch)
        return result

    def _register(self, messages: Sequence[BaseMessage | Any], prefetch: bool) -> None:
        documents = [
            document
            for message in messages
            if isinstance(message, ToolMessage)
            for document in artifact_documents([message]) or [Document(message.text)]
            if document.page_content.strip()
        ]
        if documents:
            self.llm.register_documents(documents, document_id_key=self.document_id_key, prefetch=prefetch)
