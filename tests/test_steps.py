"""Iterators run from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import pytest

from cachecraft_rag.steps import Steps

WAIT_S = 20


class Numbers:
    """A generator of numbers whose steps wait for a gate, and which tells when it ended."""

    def __init__(self, is_open: bool = True) -> None:
        self.gate, self.entered, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.count = 0
        if is_open:
            self.gate.set()

    def __call__(self, stop: int = 3) -> Generator[int, None, None]:
        try:
            while self.count < stop:
                self.entered.set()
                assert self.gate.wait(WAIT_S)
                self.count += 1
                yield self.count
        finally:
            self.ended.set()


async def test_items_come_in_order_and_none_after_the_last() -> None:
    steps = Steps(Numbers()())
    assert [await steps.take() for _ in range(5)] == [1, 2, 3, None, None]


async def test_the_last_item_alone_can_be_taken() -> None:
    assert await Steps(Numbers()()).take_last() == 3
    assert await Steps(Numbers()(stop=0)).take_last() is None


async def test_an_exception_reaches_the_caller() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise LookupError("broken")

    steps = Steps(broken())
    assert await steps.take() == 1
    with pytest.raises(LookupError, match="broken"):
        await steps.take()


async def test_closing_between_steps_ends_the_generator_at_once() -> None:
    numbers = Numbers()
    steps = Steps(numbers())
    await steps.take()
    steps.close()
    assert numbers.ended.is_set()
    assert await steps.take() is None


@pytest.mark.parametrize("method", ["take", "take_last"])
async def test_a_step_under_way_closes_the_generator_itself(method: str) -> None:
    numbers = Numbers(is_open=False)
    steps = Steps(numbers())
    task = asyncio.create_task(getattr(steps, method)())
    await asyncio.to_thread(numbers.entered.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.close()  # returns although the step still waits
    assert not numbers.ended.is_set()
    numbers.gate.set()
    assert await asyncio.to_thread(numbers.ended.wait, WAIT_S)
    assert numbers.count == 1


def test_closing_before_the_first_step_is_harmless() -> None:
    numbers = Numbers()
    steps = Steps(numbers())
    steps.close()
    steps.close()
    assert numbers.count == 0


async def test_the_event_loop_runs_during_a_step() -> None:
    numbers = Numbers(is_open=False)
    task = asyncio.create_task(Steps(numbers()).take())
    await asyncio.to_thread(numbers.entered.wait, WAIT_S)
    assert not task.done()
    numbers.gate.set()  # only a free loop gets here
    assert await task == 1


async def test_a_step_that_fails_after_closing_closes_the_iterator_too() -> None:
    class Broken:
        """Not a generator: an exception doesn't end it by itself."""

        def __init__(self) -> None:
            self.gate, self.entered, self.ended = threading.Event(), threading.Event(), threading.Event()

        def __next__(self) -> int:
            self.entered.set()
            assert self.gate.wait(WAIT_S)
            raise LookupError("broken")

        def close(self) -> None:
            self.ended.set()

    broken = Broken()
    steps = Steps(broken)
    task = asyncio.create_task(steps.take())
    await asyncio.to_thread(broken.entered.wait, WAIT_S)
    steps.close()
    assert not broken.ended.is_set()
    broken.gate.set()
    with pytest.raises(LookupError, match="broken"):
        await task
    assert broken.ended.is_set()
