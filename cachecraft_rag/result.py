"""Answers: complete, or as a stream of text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from cachecraft_rag.stats import RequestStats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationResult:
    """A complete answer.

    Attributes:
        text: The answer, without special tokens and without the stop text.
        token_ids: Its tokens, without the end-of-sequence token.
        stats: What it cost.
        finish_reason: ``"stop"`` at an end-of-sequence token or a stop text, ``"length"`` at the token limit.
    """

    text: str
    token_ids: tuple[int, ...]
    stats: RequestStats
    finish_reason: FinishReason


class AnswerStream(Iterator[str]):
    """Text deltas of an answer, computed as they are asked for; their join equals the text of ``generate``.

    An exception inside generation comes out of ``next``. Closing the stream, or dropping it, ends the generation.
    """

    def __init__(self, deltas: Generator[str, None, GenerationResult]) -> None:
        self._deltas = deltas
        self._result: GenerationResult | None = None

    def __next__(self) -> str:
        try:
            return next(self._deltas)
        except StopIteration as end:
            self._result = end.value if self._result is None else self._result
            raise

    @property
    def result(self) -> GenerationResult:
        """The complete answer with its statistics.

        Raises:
            RuntimeError: The stream is not used up yet, or was closed early.
        """
        if self._result is None:
            raise RuntimeError("the stream has no result before its last delta was taken")
        return self._result

    def close(self) -> None:
        """Stop generating."""
        self._deltas.close()
