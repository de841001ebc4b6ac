"""An answer on its way from the engine to LlamaIndex: whole or in pieces, for loops and for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llama_index.core.instrumentation.span import active_span_id

from cachecraft_rag import AnswerStream, GenerationResult
from cachecraft_rag.steps import Steps
from cachecraft_rag.tool_calls import ToolCall, ToolCallReader
from llama_index.llms.cachecraft.instrumentation import report
from llama_index.llms.cachecraft.tool_use import ToolUse

Response = TypeVar("Response")


@dataclass(frozen=True)
class Piece:
    """A step of an answer.

    Attributes:
        text: The answer so far.
        delta: What this step added; ``None`` when the answer comes as a whole.
        result: The complete answer with its statistics; on the last piece only.
        calls: The tools that the model calls; on the last piece only.
    """

    text: str
    delta: str | None
    result: GenerationResult | None = None
    calls: Sequence[ToolCall] = ()


@dataclass(frozen=True)
class Answer(Generic[Response]):
    """An answer that is taken in one of four ways. Leaving a loop or cancelling a task ends the generation.

    Attributes:
        stream: The engine's answer.
        shape: Makes a response of a piece.
        model: Name of the model, for the event.
        tools: What the model may call; held back in a stream until it is clear what is text and what is a call.
        span_id: The span of the call, which may be over when the last piece is taken.
    """

    stream: AnswerStream
    shape: Callable[[Piece], Response]
    model: str
    tools: ToolUse | None = None
    span_id: str | None = field(default_factory=active_span_id.get)

    def whole(self) -> Response:
        """The complete answer."""
        with closing(self.stream):
            for _ in self.stream:
                continue
            return self._whole()

    async def awhole(self) -> Response:
        """The complete answer, computed in a thread."""
        with closing(Steps(self.stream)) as steps:
            await steps.take_last()
        return self._whole()

    def pieces(self) -> Generator[Response, None, None]:
        """The answer piece by piece; the last one has the statistics."""
        reader = self._reader()
        with closing(self.stream):
            for delta in self.stream:
                shown = reader.take(delta)
                yield self.shape(Piece(reader.shown, shown))
            yield self._last(reader, is_streamed=True)

    async def apieces(self) -> AsyncGenerator[Response, None]:
        """The answer piece by piece, every step in a thread."""
        reader = self._reader()
        with closing(Steps(self.stream)) as steps:
            while (delta := await steps.take()) is not None:
                shown = reader.take(delta)
                yield self.shape(Piece(reader.shown, shown))
            yield self._last(reader, is_streamed=True)

    def _reader(self) -> ToolCallReader:
        return ToolCallReader() if self.tools is None else self.tools.offered.reader()

    def _whole(self) -> Response:
        reader = self._reader()
        reader.take(self.stream.result.text)
        return self._last(reader, is_streamed=False)

    def _last(self, reader: ToolCallReader, is_streamed: bool) -> Response:
        result = self.stream.result
        report(self.model, result.stats, self.span_id)
        said = reader.finish()
        text = said.text + "".join(call.text for call in said.broken)  # LlamaIndex has no place for what is no call
        calls = said.calls if self.tools is None or self.tools.is_parallel else said.calls[:1]
        return self.shape(Piece(text, text[len(reader.shown) :] if is_streamed else None, result, calls))
