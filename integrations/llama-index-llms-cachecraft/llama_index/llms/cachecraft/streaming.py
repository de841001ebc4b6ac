"""An engine's stream as pieces with the text so far, for loops and for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from cachecraft_rag import AnswerStream, GenerationResult
from cachecraft_rag.steps import Steps

Response = TypeVar("Response")


@dataclass(frozen=True)
class Piece:
    """A step of an answer.

    Attributes:
        text: The answer so far.
        delta: What this step added.
        result: The complete answer with its statistics; on the last piece only, whose delta is empty.
    """

    text: str
    delta: str
    result: GenerationResult | None = None


def responses_of(stream: AnswerStream, shape: Callable[[Piece], Response]) -> Generator[Response, None, None]:
    """Take a stream piece by piece, each as ``shape`` makes it; leaving the loop ends the generation."""
    text = ""
    with closing(stream):
        for delta in stream:
            text += delta
            yield shape(Piece(text, delta))
        yield shape(Piece(text, "", stream.result))


async def aresponses_of(stream: AnswerStream, shape: Callable[[Piece], Response]) -> AsyncGenerator[Response, None]:
    """Like ``responses_of`` on an event loop: every step runs in a thread. Cancelling ends the generation."""
    text = ""
    with closing(Steps(stream)) as steps:
        while (delta := await steps.take()) is not None:
            text += delta
            yield shape(Piece(text, delta))
        yield shape(Piece(text, "", stream.result))


async def aresult(stream: AnswerStream) -> GenerationResult:
    """The complete answer, computed in a thread. Cancelling ends the generation."""
    with closing(Steps(stream)) as steps:
        await steps.take_last()
    return stream.result
