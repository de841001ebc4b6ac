"""One request in the hands of the scheduler, from the line to the end of its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue

from cachecraft_rag.answer import Answer
from cachecraft_rag.request import Request
from cachecraft_rag.result import GenerationResult

LOOKAHEAD = 8
"""Pieces of text that are drawn for a reader ahead of time. Readers of one batch don't come back at the same moment;
with less the others would run without whoever is late. With more, more is computed for a reader who leaves."""


@dataclass(eq=False)
class Ticket:
    """What the scheduler knows of a request. Whoever runs the model writes it, whoever waits for the answer reads.

    Attributes:
        request: The request.
        reuse: Whether chunks may be reused.
        owner: Requests of one owner are waited for by one thread.
        is_whole: Whether the answer is wanted as a whole, and not piece by piece.
        deadline: ``time.perf_counter()`` at which it must be complete; ``None`` for no limit.
        num_bytes: Size of its KV buffer.
        pieces: Text as it becomes certain; ``None`` after the last.
        answer: What has been drawn, from the first token on.
        chunks: Names of its chunks: namespace and text.
        queued: ``time.perf_counter()`` when it came into line.
        num_overtaken: How many that came later were taken before it.
        is_cancelled: Whether nobody waits for it any more.
        is_parked: Whether its reader has not taken what was drawn ahead.
        is_batchable: Whether its rows may share a pass with those of others; ``None`` until somebody asks.
        result: The complete answer.
        error: Why there is none.
    """

    request: Request
    reuse: bool
    owner: object
    is_whole: bool
    deadline: float | None
    num_bytes: int
    pieces: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    answer: Answer | None = None
    chunks: frozenset[tuple[str, str]] = frozenset()
    queued: float = field(default_factory=time.perf_counter)
    num_overtaken: int = 0
    is_cancelled: bool = False
    is_parked: bool = False
    is_batchable: bool | None = None
    result: GenerationResult | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.chunks = frozenset((self.request.namespace, span.text) for span in self.request.encoded.spans)

    def is_ready(self) -> bool:
        """Whether it waits for a token that somebody will read soon; parks it where nobody does."""
        if self.answer is None or self.answer.is_complete:
            return False
        if self.is_whole or self.pieces.qsize() < LOOKAHEAD:
            self.is_parked = False
            return True
        self.is_parked = True  # first, so that a reader who takes a piece now sees it
        self.is_parked = self.pieces.qsize() >= LOOKAHEAD
        return not self.is_parked

    def draw(self, answer: Answer, text: str) -> None:
        """Note a token that was drawn, and hand on the text that has become certain."""
        self.answer = answer
        if text and not self.is_whole:
            self.pieces.put(text)

    def end(self, result: GenerationResult | None, error: Exception | None) -> None:
        """Tell whoever waits that this is all, and let go of what the request held."""
        self.result, self.error = result, error
        self.request.release()
        self.request.chunks = []
        self.pieces.put(None)

    def outcome(self) -> GenerationResult:
        """The complete answer.

        Raises:
            Exception: What ended it early.
        """
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result
