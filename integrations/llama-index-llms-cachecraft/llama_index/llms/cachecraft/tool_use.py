"""The tools of one call: which are offered, and what the model made of them, as LlamaIndex knows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool

from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.tool_calls import ToolCall
from cachecraft_rag.tools import CallFormat, OfferedTools

TOOL_OPTIONS = ("tools", "tool_choice", "allow_parallel_tool_calls")


@dataclass(frozen=True)
class ToolUse:
    """Tools of one call.

    Attributes:
        offered: What the model is shown, and what its answer begins with where a tool must be called.
        is_parallel: Whether the model may call several.
    """

    offered: OfferedTools
    is_parallel: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any], prompts: PromptEncoder, model: str) -> ToolUse | None:
        """What the options of a call ask for; ``None`` without tools.

        Args:
            given: ``tools`` (descriptions or LlamaIndex tools), ``tool_choice`` (``"auto"``, ``"none"``, ``"any"``,
                ``"required"``, or a tool's name) and ``allow_parallel_tool_calls``.
            prompts: Renders the model's template.
            model: Its name, for errors.

        Raises:
            ValueError: The model can't call tools, or the choice is none of them.
        """
        tools = [_description(tool) for tool in given.get("tools") or ()]
        offered = OfferedTools.of(tools, given.get("tool_choice"), prompts)
        if offered is None:
            return None
        if not calls_functions(prompts):
            raise ValueError(f"tools: the chat template of {model!r} doesn't support them; use a ReActAgent instead")
        return cls(offered, bool(given.get("allow_parallel_tool_calls", True)))


def calls_functions(prompts: PromptEncoder) -> bool:
    """Whether a model's template has a place for tools and for their calls in earlier messages."""
    call_format = CallFormat.of(prompts)
    return call_format.shows_tools and call_format.shows_calls


def call_blocks(calls: Sequence[ToolCall]) -> list[ToolCallBlock]:
    """Calls as blocks of a message."""
    return [ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments) for call in calls]


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
