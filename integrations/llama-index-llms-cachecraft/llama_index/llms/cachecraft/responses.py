"""Answers of the engine as LlamaIndex's responses: plain data, never a tensor."""

from __future__ import annotations

import json
from typing import Any

from llama_index.core.base.llms.types import ContentBlock
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock

from cachecraft_rag import GenerationResult
from llama_index.llms.cachecraft.answer import Piece
from llama_index.llms.cachecraft.tool_use import call_blocks


def completion(piece: Piece) -> CompletionResponse:
    """An answer to ``complete``, or a step of it; the complete one has ``raw``."""
    return CompletionResponse(text=piece.text, delta=piece.delta, raw=_raw(piece.result))


def chat(piece: Piece) -> ChatResponse:
    """An answer to ``chat``, or a step of it; the complete one has ``raw``, and the calls of tools as blocks."""
    calls = call_blocks(piece.calls)
    if not calls:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=piece.text)
    else:
        blocks: list[ContentBlock] = [TextBlock(text=piece.text)] if piece.text else []
        # LlamaIndex's streamed structured output looks for calls here, and for their form nowhere.
        listed = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.tool_name, "arguments": json.dumps(call.tool_kwargs)},
            }
            for call in calls
        ]
        message = ChatMessage(
            role=MessageRole.ASSISTANT, blocks=[*blocks, *calls], additional_kwargs={"tool_calls": listed}
        )
    return ChatResponse(message=message, delta=piece.delta, raw=_raw(piece.result))


def _raw(result: GenerationResult | None) -> dict[str, Any] | None:
    """Token counts under the names that token counters look for, and the engine's statistics."""
    if result is None:
        return None
    stats = result.stats
    return {
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.output_tokens,
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
        },
        "finish_reason": result.finish_reason,
        "cachecraft": stats.model_dump(mode="json"),
    }
