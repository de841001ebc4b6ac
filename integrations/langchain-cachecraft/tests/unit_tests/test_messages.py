"""LangChain messages on their way to a chat template."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_cachecraft.messages import artifact_documents, chat_messages


def test_every_kind_of_message_gets_the_role_that_templates_know() -> None:
    messages = [
        SystemMessage("a"),
        HumanMessage("b"),
        AIMessage("c"),
        ToolMessage("d", tool_call_id="1"),
        ChatMessage(content="e", role="critic"),
    ]
    assert chat_messages(messages) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
        {"role": "critic", "content": "e"},
    ]


def test_text_blocks_are_joined_with_nothing_between_them() -> None:
    content: list[Any] = ["one ", {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    assert chat_messages([HumanMessage(content)]) == [{"role": "user", "content": "one two"}]


def test_plain_text_documents_in_a_message_are_text() -> None:
    content: list[Any] = [{"type": "text-plain", "text": "one ", "mime_type": "text/plain"}, "two"]
    assert chat_messages([HumanMessage(content)]) == [{"role": "user", "content": "one two"}]


def test_tool_calls_keep_their_arguments_as_a_mapping() -> None:
    call = {"name": "search", "args": {"query": "lease"}, "id": "7"}
    (message,) = chat_messages([AIMessage("", tool_calls=[call])])
    expected = {"type": "function", "id": "7", "function": {"name": "search", "arguments": {"query": "lease"}}}
    assert message["tool_calls"] == [expected]


def test_a_name_is_passed_on() -> None:
    assert chat_messages([HumanMessage("hi", name="Ann")]) == [{"role": "user", "content": "hi", "name": "Ann"}]


def test_what_a_model_wrote_beside_its_answer_is_left_out() -> None:
    content: list[Any] = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "yes"}]
    assert chat_messages([AIMessage(content)])[0]["content"] == "yes"


@pytest.mark.parametrize("kind", [HumanMessage, AIMessage])
def test_an_image_is_refused_with_its_place(kind: type[BaseMessage]) -> None:
    content: list[Any] = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ValueError, match=r"messages\[1\]\.content\[1\]: a block of type 'image_url'"):
        chat_messages([HumanMessage("hi"), kind(content=content)])


def test_reasoning_of_a_user_is_not_dropped_silently() -> None:
    content: list[Any] = [{"type": "reasoning", "reasoning": "hm"}]
    with pytest.raises(ValueError, match="'reasoning'"):
        chat_messages([HumanMessage(content)])


def test_a_message_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]: a RemoveMessage .* allowed: SystemMessage, .*ChatMessage"):
        chat_messages([RemoveMessage(id="1")])


@pytest.mark.parametrize(
    ("artifact", "texts"),
    [
        ([Document("a"), Document("b")], ["a", "b"]),
        ((Document("a"),), ["a"]),
        (Document("a"), ["a"]),
        ([Document("a"), {"page_content": "b"}, "c"], ["a"]),
        ({"rows": 3}, []),
        (None, []),
    ],
)
def test_documents_are_found_in_the_artifacts_of_tools(artifact: object, texts: list[str]) -> None:
    messages = [HumanMessage("hi"), ToolMessage("found", tool_call_id="1", artifact=artifact)]
    assert [document.page_content for document in artifact_documents(messages)] == texts
