"""Agents: what tools return is known before the model reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, create_retriever_tool, tool

from langchain_cachecraft import CacheCraftMiddleware, ChatCacheCraft
from tests.conftest import passage

QUESTION: dict[str, Any] = {"messages": [HumanMessage("When does the lease end?")]}


@tool("search")
def search_text(query: str) -> str:
    """Search the contracts."""
    return passage(81)


@tool("search", response_format="content_and_artifact")
def search_documents(query: str) -> tuple[str, list[Document]]:
    """Search the contracts."""
    documents = [Document(passage(number), metadata={"source": "lease.pdf"}) for number in (82, 83)]
    return "\n\n".join(document.page_content for document in documents), documents


@pytest.fixture
def chat(scripted_folder: str) -> Iterator[ChatCacheCraft]:
    chat = ChatCacheCraft(model=scripted_folder, max_tokens=12, auto_register=False, namespace="agent")
    yield chat
    chat.close()


def figures(state: dict[str, Any], name: str) -> list[Any]:
    return [m.response_metadata["cachecraft"][name] for m in state["messages"] if isinstance(m, AIMessage)]


@pytest.mark.parametrize(("search", "num_chunks"), [(search_text, 1), (search_documents, 2)])
async def test_an_agent_finds_the_chunks_of_its_tools(chat: ChatCacheCraft, search: BaseTool, num_chunks: int) -> None:
    agent: Any = create_agent(chat, [search], middleware=[CacheCraftMiddleware(chat)])
    states = [agent.invoke(QUESTION), await agent.ainvoke(QUESTION)]
    for state in states:
        assert [type(message) for message in state["messages"]] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
        assert state["messages"][-1].text == "It ends on the 9th of May."
    assert figures(states[0], "chunk_misses") == [0, num_chunks]
    assert figures(states[1], "chunk_hits") == [0, num_chunks]


def test_without_the_middleware_such_an_agent_knows_no_chunk(chat: ChatCacheCraft) -> None:
    agent: Any = create_agent(chat, [search_documents])
    assert figures(agent.invoke(QUESTION), "chunk_misses") == [0, 0]


def test_artifacts_need_no_middleware_by_default(scripted_folder: str) -> None:
    chat = ChatCacheCraft(model=scripted_folder, max_tokens=12, namespace="artifacts")
    agent: Any = create_agent(chat, [search_documents])
    assert figures(agent.invoke(QUESTION), "chunk_misses") == [0, 2]
    chat.close()


def test_a_retriever_tool_needs_no_middleware_by_default(scripted_folder: str, make_retriever: Any) -> None:
    chat = ChatCacheCraft(model=scripted_folder, max_tokens=12, namespace="retriever tool")
    agent: Any = create_agent(chat, [create_retriever_tool(make_retriever(84, 85), "search", "Search the contracts.")])
    assert figures(agent.invoke(QUESTION), "chunk_misses") == [0, 2]
    chat.close()


def test_tool_messages_of_an_earlier_process_are_known(chat: ChatCacheCraft) -> None:
    agent: Any = create_agent(chat, [search_text], middleware=[CacheCraftMiddleware(chat)])
    call = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "lease"}, "id": "1"}])
    state = agent.invoke({"messages": [*QUESTION["messages"], call, ToolMessage(passage(86), tool_call_id="1")]})
    assert state["messages"][-1].response_metadata["cachecraft"]["chunk_misses"] == 1


def test_documents_of_tools_are_invalidated_by_name(chat: ChatCacheCraft) -> None:
    agent: Any = create_agent(chat, [search_documents], middleware=[CacheCraftMiddleware(chat)])
    agent.invoke(QUESTION)
    assert chat.get_engine().invalidate(namespace="agent", document_ids=["lease.pdf"]) == 2


def test_what_a_tool_returns_is_loaded_at_once(chat: ChatCacheCraft, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(chat.get_engine(), "prefetch", lambda texts, namespace: asked.append(list(texts)))
    for prefetch in (True, False):
        middleware = CacheCraftMiddleware(chat, prefetch=prefetch)
        agent: Any = create_agent(chat, [search_text], middleware=[middleware])
        agent.invoke(QUESTION)
    assert asked == [[passage(81)]]


def test_a_tool_that_finds_nothing_is_no_chunk(chat: ChatCacheCraft) -> None:
    @tool("search")
    def search_nothing(query: str) -> str:
        """Search the contracts."""
        return " "

    agent: Any = create_agent(chat, [search_nothing], middleware=[CacheCraftMiddleware(chat)])
    assert agent.invoke(QUESTION)["messages"][-1].text == "It ends on the 9th of May."
