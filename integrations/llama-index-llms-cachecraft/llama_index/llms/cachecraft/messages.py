"""Chat messages of LlamaIndex as the chat templates of models know them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, TextBlock

from cachecraft_rag import RagPrompt

# Roles that templates don't know, and those that mean the same.
_ROLES = {"developer": "system", "chatbot": "assistant", "model": "assistant", "function": "tool"}
# Blocks that are no part of what the model reads.
_SILENT_BLOCKS = ("cache", "thinking", "tool_call")
_TOOL_FIELDS = ("name", "tool_call_id")


def to_prompt(messages: Sequence[ChatMessage]) -> RagPrompt:
    """The prompt of a chat. A text block in front of a cache point is a chunk; others are found by their text.

    Args:
        messages: The chat.

    Raises:
        ValueError: A message holds something other than text.
    """
    chunks = [
        block.text
        for message in messages
        for block, following in zip(message.blocks, message.blocks[1:], strict=False)
        if isinstance(block, TextBlock) and _kind(following) == "cache" and block.text.strip()
    ]
    return RagPrompt.from_messages([_to_dict(index, message) for index, message in enumerate(messages)], chunks)


def check_text_only(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that hold something other than text.

    Raises:
        ValueError: The first such message and block.
    """
    for index, message in enumerate(messages):
        _text(index, message)


def _to_dict(index: int, message: ChatMessage) -> dict[str, Any]:
    role = _ROLES.get(message.role.value, message.role.value)
    given = message.additional_kwargs if role == "tool" else {}
    return {
        "role": role,
        "content": _text(index, message),
        **{name: given[name] for name in _TOOL_FIELDS if name in given},
        **({"tool_calls": calls} if (calls := _tool_calls(message)) else {}),
    }


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """The calls that a message of the model holds: as blocks, or as other LLMs of LlamaIndex list them beside it."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [_call(block.tool_call_id, block.tool_name, block.tool_kwargs) for block in blocks]
    calls = []
    for listed in message.additional_kwargs.get("tool_calls") or ():
        function = _field(listed, "function") or listed
        calls.append(_call(_field(listed, "id"), _field(function, "name"), _field(function, "arguments")))
    return calls


def _call(call_id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """A call with its arguments as templates want them: not as text."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            read = None  # what the model once wrote; it is shown as it is
        arguments = read if isinstance(read, dict) else arguments
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _field(thing: Any, name: str) -> Any:
    """A field of a dictionary or of an object of a client library."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _text(index: int, message: ChatMessage) -> str:
    texts = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif _kind(block) not in _SILENT_BLOCKS:
            raise ValueError(f"messages[{index}]: a {type(block).__name__} was given, but this model reads text only")
    return "\n".join(texts)


def _kind(block: Any) -> str:
    return str(getattr(block, "block_type", ""))
