"""Answers of the engine as LlamaIndex's responses: plain data, never a tensor."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from cachecraft_rag import GenerationResult
from llama_index.llms.cachecraft.streaming import Piece


def completion(result: GenerationResult) -> CompletionResponse:
    """A complete answer to ``complete``."""
    return CompletionResponse(text=result.text, raw=_raw(result))


def chat(result: GenerationResult) -> ChatResponse:
    """A complete answer to ``chat``."""
    return ChatResponse(message=_assistant(result.text), raw=_raw(result))


def completion_piece(piece: Piece) -> CompletionResponse:
    """A step of a streamed completion; the last one has ``raw``."""
    return CompletionResponse(text=piece.text, delta=piece.delta, raw=_raw(piece.result))


def chat_piece(piece: Piece) -> ChatResponse:
    """A step of a streamed chat answer; the last one has ``raw``."""
    return ChatResponse(message=_assistant(piece.text), delta=piece.delta, raw=_raw(piece.result))


def _assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


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
