"""LangChain messages as a chat template reads them, and the documents that ride on tool messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_TEXTS = ("text", "text-plain")
# What models write beside their answer. Tool calls are read from the message's own field.
_BESIDE_AN_ANSWER = {
    "invalid_tool_call",
    "reasoning",
    "redacted_thinking",
    "thinking",
    "tool_call",
    "tool_call_chunk",
    "tool_use",
}


def chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for a chat template; contents become plain text, blocks are joined with nothing between them.

    Raises:
        ValueError: A message is of an unknown kind, or has content that is not text.
    """
    return [_chat_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def artifact_documents(messages: Sequence[BaseMessage]) -> list[Document]:
    """The documents that retrieval tools attached to their messages."""
    found = []
    for message in messages:
        artifact = message.artifact if isinstance(message, ToolMessage) else None
        documents = artifact if isinstance(artifact, list | tuple) else [artifact]
        found += [document for document in documents if isinstance(document, Document)]
    return found


def _chat_message(place: str, message: BaseMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": _role(place, message), "content": _text(place, message)}
    if message.name is not None:
        fields["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _role(place: str, message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    allowed = ", ".join([*(kind.__name__ for kind in _ROLES), "ChatMessage"])
    raise ValueError(f"{place}: a {type(message).__name__} can't be given to a chat template; allowed: {allowed}")


def _text(place: str, message: BaseMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    skipped = _BESIDE_AN_ANSWER if isinstance(message, AIMessage) else set()
    parts = []
    for index, block in enumerate(content):
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") in _TEXTS and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif block.get("type") not in skipped:
            raise ValueError(
                f"{place}.content[{index}]: a block of type {block.get('type')!r} can't be read by a text model; "
                "allowed: strings and blocks of type 'text' or 'text-plain'"
            )
    return "".join(parts)
