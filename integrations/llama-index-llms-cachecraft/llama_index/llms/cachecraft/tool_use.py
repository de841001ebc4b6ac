"""The tools of one call: which are offered, whether one must be called, and what the model made of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool

from llama_index.llms.cachecraft.tool_format import (
    ToolCall,
    ToolFormat,
    decode_object,
    find_calls,
    settled,
    text_before,
)

TOOL_OPTIONS = ("tools", "tool_choice", "allow_parallel_tool_calls")
_WORDS = ("auto", "none", "required", "any")


@dataclass(frozen=True)
class ToolUse:
    """Tools of one call.

    Attributes:
        tools: Their descriptions, in OpenAI's form, for the chat template.
        opening: What the answer begins with where a tool must be called; the model continues it.
        is_parallel: Whether the model may call several.
    """

    tools: tuple[dict[str, Any], ...]
    opening: str = ""
    is_parallel: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any], tool_format: ToolFormat | None, model: str) -> ToolUse | None:
        """What the options of a call ask for; ``None`` without tools.

        Args:
            given: ``tools`` (descriptions or LlamaIndex tools), ``tool_choice`` (``"auto"``, ``"none"``,
                ``"required"``, or a tool's name) and ``allow_parallel_tool_calls``.
            tool_format: How the model writes calls; ``None`` when it can't.
            model: Its name, for errors.

        Raises:
            ValueError: The model can't call tools, or the choice is none of them.
        """
        tools = tuple(_description(tool) for tool in given.get("tools") or ())
        choice = _choice(given.get("tool_choice"))
        if not tools or choice == "none":
            return None
        if tool_format is None:
            raise ValueError(f"tools: the chat template of {model!r} doesn't support them; use a ReActAgent instead")
        names = [tool["function"]["name"] for tool in tools]
        if choice not in (*_WORDS, *names):
            raise ValueError(f"tool_choice: {choice!r} is none of {', '.join([*_WORDS, *names])}")
        if choice in names:
            tools = tuple(tool for tool in tools if tool["function"]["name"] == choice)
            names = [choice]
        opening = "" if choice == "auto" else tool_format.opening_of(names)
        return cls(tools, opening, bool(given.get("allow_parallel_tool_calls", True)))

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [tool["function"]["name"] for tool in self.tools]

    def shown(self, text: str) -> str:
        """The part of an unfinished answer that is surely no call."""
        return "" if self.opening else settled(text)

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """What the model said before its calls, and the calls."""
        calls = find_calls(self.opening + text, self.names)
        if not calls and len(self.names) == 1 and self.opening:
            # The arguments are complete, but what should follow them is not.
            decoded = decode_object(text.lstrip(), 0)
            calls = [] if decoded is None else [ToolCall(self.names[0], decoded[0])]
        if not calls:
            return self.opening + text, []
        said = "" if self.opening else text_before(text, calls[0].start)
        return said, calls if self.is_parallel else calls[:1]


def call_blocks(calls: Sequence[ToolCall]) -> list[ToolCallBlock]:
    """Calls as blocks of a message. Their ids are nine letters and digits: some templates refuse others."""
    return [
        ToolCallBlock(tool_call_id=uuid.uuid4().hex[:9], tool_name=call.name, tool_kwargs=call.arguments)
        for call in calls
    ]


def selections(message: ChatMessage) -> list[ToolSelection]:
    """The calls in a message of a model."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {},
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _description(tool: Any) -> dict[str, Any]:
    if isinstance(tool, BaseTool):
        return tool.metadata.to_openai_tool(skip_length_check=True)
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict) and tool["function"].get("name"):
        return tool
    raise ValueError(f"tools: {tool!r} is neither a tool of LlamaIndex nor a description in OpenAI's form")


def _choice(choice: Any) -> str:
    """The choice as one word; OpenAI's nested form names a tool."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name", str(choice))
    return "auto" if choice is None else str(choice)
