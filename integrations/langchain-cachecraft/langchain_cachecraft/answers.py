"""What an answer of the engine looks like in LangChain: messages and texts with usage figures, plain data only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

from cachecraft_rag import GenerationResult
from cachecraft_rag.tool_calls import ToolAnswer, ToolCallReader

PROVIDER = "cachecraft"


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Attributes:
        result: What the engine returned.
        model: Name of the model that answered.
        said: Its text and its tool calls.
        num_shown: How many characters of the text a stream has given out before the end.
    """

    result: GenerationResult
    model: str
    said: ToolAnswer
    num_shown: int = 0

    @classmethod
    def of(cls, result: GenerationResult, model: str, reader: ToolCallReader) -> Answer:
        """The answer of a chat model, after its reader took all of the text."""
        return cls(result, model, reader.finish(is_cut=result.finish_reason == "length"), len(reader.shown))

    def chat_result(self) -> ChatResult:
        """The answer as a message."""
        message = AIMessage(
            content=self.said.text,
            tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in self.said.calls],
            invalid_tool_calls=[
                invalid_tool_call(name=call.name, args=call.text, id=call.id, error=call.reason)
                for call in self.said.broken
            ],
            usage_metadata=self._usage(),
            response_metadata=self._metadata(),
        )
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=self._generation_info())])

    def last_chunk(self) -> ChatGenerationChunk:
        """The end of a stream of messages: what was held back, all tool calls and all figures."""
        calls = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in self.said.calls]
        broken = [(call.name, _never_json(call.text), call.id) for call in self.said.broken]
        message = AIMessageChunk(
            content=self.said.text[self.num_shown :],
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
        return Generation(text=self.said.text, generation_info=self._text_info())

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


def _never_json(text: str) -> str:
    """Text that is no beginning of JSON: LangChain completes what it finds in a stream, and a broken call would run."""
    return f"<tool_call>{text.removeprefix('<tool_call>')}"
