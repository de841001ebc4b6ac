"""An engine's stream as pieces with the text so far, for loops and for event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from cachecraft_rag import AnswerStream, GenerationResult

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
    try:
        for delta in stream:
            text += delta
            yield shape(Piece(text, delta))
        yield shape(Piece(text, "", stream.result))
    finally:
        stream.close()


async def aresponses_of(stream: AnswerStream, shape: Callable[[Piece], Response]) -> AsyncGenerator[Response, None]:
    """Like ``responses_of`` on an event loop: every step runs in a thread. Cancelling ends the generation."""
    text = ""
    steps = _Steps(stream)
    try:
        while (delta := await asyncio.to_thread(steps.take)) is not None:
            text += delta
            yield shape(Piece(text, delta))
        yield shape(Piece(text, "", stream.result))
    finally:
        steps.abandon()


async def aresult(stream: AnswerStream) -> GenerationResult:
    """The complete answer, computed in a thread. Cancelling ends the generation."""
    steps = _Steps(stream)
    try:
        await asyncio.to_thread(steps.take_all)
    finally:
        steps.abandon()
    return stream.result


class _Steps:
    """Takes a stream's deltas in threads; may be abandoned at any moment, also while a delta is being computed."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_abandoned = False

    def take(self) -> str | None:
        """The next delta; ``None`` at the end, and when abandoned."""
        with self._lock:
            delta = None if self._is_abandoned else next(self._stream, None)
        if self._is_abandoned:
            self._close_if_idle()
        return delta

    def take_all(self) -> None:
        """Take deltas up to the end, or until abandoned."""
        while self.take() is not None:
            continue

    def abandon(self) -> None:
        """Close the stream: now, or by the thread that is in the middle of a step when it is through."""
        self._is_abandoned = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._stream.close()
            finally:
                self._lock.release()
