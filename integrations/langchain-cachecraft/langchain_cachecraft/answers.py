"""What an answer of the engine looks like in LangChain: messages and texts with usage figures, plain data only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

from cachecraft_rag import GenerationResult
from langchain_cachecraft.tool_calls import ToolCallReader, ToolCalls

PROVIDER = "cachecraft"


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Attributes:
        result: What the engine returned.
        model: Name of the model that answered.
        text: The answer without its tool calls.
        tools: The tool calls, and as their ``text`` what of ``text`` was held back in a stream.
    """

    result: GenerationResult
    model: str
    text: str
    tools: ToolCalls = field(default_factory=ToolCalls)

    @classmethod
    def of(cls, result: GenerationResult, model: str, reader: ToolCallReader) -> Answer:
        """The answer of a chat model, after its reader took all of the text."""
        tools = reader.finish(is_cut=result.finish_reason == "length")
        return cls(result, model, reader.shown + tools.text, tools)

    def chat_result(self) -> ChatResult:
        """The answer as a message."""
        message = AIMessage(
            content=self.text,
            tool_calls=self.tools.calls,
            invalid_tool_calls=self.tools.invalid,
            usage_metadata=self._usage(),
            response_metadata=self._metadata(),
        )
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=self._generation_info())])

    def last_chunk(self) -> ChatGenerationChunk:
        """The end of a stream of messages: what was held back, all tool calls and all figures."""
        calls = [(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"]) for call in self.tools.calls]
        broken = [(call["name"], _broken(call["args"]), call["id"]) for call in self.tools.invalid]
        message = AIMessageChunk(
            content=self.tools.text,
            chunk_position="last",
            tool_call_chunks=[
                tool_call_chunk(name=name, args=args, id=call_id, index=index)
                for index, (name, args, call_id) in enumerate(calls + broken)
            ],
            usage_metadata=self._usage(),
            response_metadata=self._metadata(),
        )
        return ChatGenerationChunk(message=message, generation_info=self._generation_info())

    def generation(self) -> Generation:
        """The answer as text."""
        return Generation(text=self.text, generation_info=self._text_info())

    def last_text_chunk(self) -> GenerationChunk:
        """The end of a stream of texts: no text, all figures."""
        return GenerationChunk(text="", generation_info=self._text_info())

    def token_usage(self) -> dict[str, int]:
        """Token counts under the names that handlers of text models look for."""
        usage = self._usage()
        return {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
            "total_tokens": usage["total_tokens"],
        }

    def _generation_info(self) -> dict[str, Any]:
        return {"finish_reason": self.result.finish_reason}

    def _text_info(self) -> dict[str, Any]:
        return {"usage_metadata": self._usage(), **self._metadata()}

    def _usage(self) -> Any:
        stats = self.result.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
            "input_token_details": {"cache_read": stats.reused_tokens, "cache_creation": stats.stored_tokens},
        }

    def _metadata(self) -> dict[str, Any]:
        return {
            "model_name": self.model,
            "model_provider": PROVIDER,
            "finish_reason": self.result.finish_reason,
            PROVIDER: self.result.stats.model_dump(),
        }


def delta_chunk(delta: str) -> ChatGenerationChunk:
    """A piece of text inside a stream."""
    return ChatGenerationChunk(message=AIMessageChunk(content=delta))


def _broken(text: str | None) -> str:
    """Text that stays no JSON: LangChain completes the arguments of a stream, and a call cut short would be run."""
    return f"<tool_call>{(text or '').removeprefix('<tool_call>')}"
