"""What an answer of the engine looks like in LangChain: messages with usage figures, plain data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cachecraft_rag import GenerationResult

PROVIDER = "cachecraft"


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Attributes:
        result: What the engine returned.
        model: Name of the model that answered.
    """

    result: GenerationResult
    model: str

    def chat_result(self) -> ChatResult:
        """The answer as a whole."""
        message = AIMessage(content=self.result.text, **self._fields())
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=self._generation_info())])

    def last_chunk(self) -> ChatGenerationChunk:
        """The end of a stream: no text, all figures."""
        message = AIMessageChunk(content="", chunk_position="last", **self._fields())
        return ChatGenerationChunk(message=message, generation_info=self._generation_info())

    def _generation_info(self) -> dict[str, Any]:
        return {"finish_reason": self.result.finish_reason}

    def _fields(self) -> dict[str, Any]:
        stats = self.result.stats
        return {
            "usage_metadata": {
                "input_tokens": stats.prompt_tokens,
                "output_tokens": stats.output_tokens,
                "total_tokens": stats.prompt_tokens + stats.output_tokens,
                "input_token_details": {"cache_read": stats.reused_tokens, "cache_creation": stats.stored_tokens},
            },
            "response_metadata": {
                "model_name": self.model,
                "model_provider": PROVIDER,
                "finish_reason": self.result.finish_reason,
                PROVIDER: stats.model_dump(),
            },
        }


def delta_chunk(delta: str) -> ChatGenerationChunk:
    """A piece of text inside a stream."""
    return ChatGenerationChunk(message=AIMessageChunk(content=delta))
