"""An engine that a test holds by the hand: no piece of an answer is given out before the test allows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

from cachecraft_rag import AnswerStream, CacheCraftEngine, EngineConfig, GenerationResult
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

WAIT_S = 60


class SteppedEngine(CacheCraftEngine):
    """Computes a piece of text, and waits inside that step until it is allowed to give it out.

    Attributes:
        num_steps: Pieces that were computed.
        entered: Counts up with every piece that waits.
        allowed: Counts down with every piece that is given out.
        is_finished: Set when an answer has ended, whichever way.
    """

    def __init__(self, max_new_tokens: int = 40) -> None:
        super().__init__(make("llama"), byte_level(), EngineConfig(max_new_tokens=max_new_tokens))
        self.num_steps = 0
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.is_finished = threading.Event()

    def stream(self, *args: Any, **kwargs: Any) -> AnswerStream:
        return AnswerStream(self._step_by_step(super().stream(*args, **kwargs)))

    async def enter(self) -> None:
        """Wait for the next piece, as a task of an event loop that must stay free meanwhile."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=WAIT_S), "no piece was computed"

    async def give_out(self, number: int) -> None:
        """Wait for so many pieces, and allow each."""
        for _ in range(number):
            await self.enter()
            self.allowed.release()

    async def finish(self) -> None:
        """Allow whatever is still to come, and wait for the end of the answer."""
        self.allowed.release(1000)
        assert await asyncio.to_thread(self.is_finished.wait, WAIT_S), "the answer never ended"

    def _step_by_step(self, stream: AnswerStream) -> Generator[str, None, GenerationResult]:
        try:
            for delta in stream:
                self.num_steps += 1
                self.entered.release()
                assert self.allowed.acquire(timeout=WAIT_S), "nobody allowed the next piece"
                yield delta
            return stream.result
        finally:
            stream.close()
            self.is_finished.set()
