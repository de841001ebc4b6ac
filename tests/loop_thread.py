"""How long an event loop's own thread is busy at a time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from itertools import pairwise


async def longest_turn(*work: Awaitable[object]) -> float:
    """Seconds of processor time of this thread between two turns of a task, at most, while other work goes on."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.thread_time())  # of this thread only, however busy the machine is
            await asyncio.sleep(0.001)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await asyncio.gather(*work)
    ticker.cancel()
    return max(later - earlier for earlier, later in pairwise(ticks))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect nothing meanwhile: it takes its time in whichever thread it begins."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
