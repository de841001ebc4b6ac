"""The async methods: the event loop stays free, calls run side by side, and cancelling ends the generation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from cachecraft_rag import AnswerStream, CacheCraftEngine, GenerationResult
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

STEP_S = 0.03


class SlowEngine(CacheCraftEngine):
    """Takes its time for every token, and tells how far it came."""

    def __init__(self) -> None:
        super().__init__(make("llama"), byte_level())
        self.num_steps = 0
        self.is_finished = threading.Event()

    def stream(self, *args: Any, **kwargs: Any) -> AnswerStream:
        return AnswerStream(self._slowly(super().stream(*args, **kwargs)))

    def _slowly(self, stream: AnswerStream) -> Generator[str, None, GenerationResult]:
        try:
            for delta in stream:
                time.sleep(STEP_S)
                self.num_steps += 1
                yield delta
            return stream.result
        finally:
            stream.close()
            self.is_finished.set()


@pytest.fixture
def slow(make_llm: Callable[..., CacheCraftLLM]) -> tuple[CacheCraftLLM, SlowEngine]:
    engine = SlowEngine()
    return make_llm(engine=engine, max_new_tokens=40), engine


async def _count_ticks(ticks: list[float]) -> None:
    while True:
        ticks.append(time.perf_counter())
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_event_loop_ticks_while_two_calls_run(
    streaming: bool, slow: tuple[CacheCraftLLM, SlowEngine]
) -> None:
    llm, _ = slow

    async def ask() -> None:
        messages = [ChatMessage(content="Hello")]
        if streaming:
            assert [step async for step in await llm.astream_chat(messages, max_new_tokens=12)]
        else:
            await llm.achat(messages, max_new_tokens=12)

    ticks: list[float] = []
    ticker = asyncio.create_task(_count_ticks(ticks))
    await asyncio.sleep(0)
    started = time.perf_counter()
    await asyncio.gather(ask(), ask())
    took = time.perf_counter() - started
    ticker.cancel()
    # A call that blocked the loop would leave one tick per call, or one per step of a stream.
    assert took > 6 * STEP_S
    assert len(ticks) > 2 * took / STEP_S


async def test_calls_side_by_side_answer_like_calls_in_turn(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm()
    questions = [f"What ends in year {year}?" for year in range(2020, 2026)]
    in_turn = [llm.complete(question).text for question in questions]
    assert len(set(in_turn)) == len(questions)
    side_by_side = await asyncio.gather(*(llm.acomplete(question) for question in questions))
    assert [response.text for response in side_by_side] == in_turn


async def test_leaving_a_stream_ends_the_generation(slow: tuple[CacheCraftLLM, SlowEngine]) -> None:
    llm, engine = slow
    stream = await llm.astream_complete("Hello")
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    await _finished(engine)
    assert engine.num_steps == 2


async def test_cancelling_a_stream_within_a_step_ends_the_generation(
    slow: tuple[CacheCraftLLM, SlowEngine],
) -> None:
    llm, engine = slow
    received: list[str] = []

    async def consume() -> None:
        async for step in await llm.astream_chat([ChatMessage(content="Hello")]):
            received.append(step.delta)

    task = asyncio.create_task(consume())
    while len(received) < 2:
        await asyncio.sleep(STEP_S / 3)
    await asyncio.sleep(STEP_S / 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _finished(engine)
    assert engine.num_steps <= len(received) + 1


@pytest.mark.parametrize("method", ["acomplete", "achat"])
async def test_a_timeout_ends_the_generation(method: str, slow: tuple[CacheCraftLLM, SlowEngine]) -> None:
    llm, engine = slow
    argument: Any = "Hello" if method == "acomplete" else [ChatMessage(content="Hello")]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(getattr(llm, method)(argument), timeout=5 * STEP_S)
    await _finished(engine)
    assert engine.num_steps < 20


def test_dropping_a_stream_ends_the_generation(slow: tuple[CacheCraftLLM, SlowEngine]) -> None:
    llm, engine = slow
    for step in llm.stream_complete("Hello"):
        assert step.delta
        break
    assert engine.is_finished.wait(5)
    assert engine.num_steps == 1


async def test_an_error_in_the_middle_of_an_answer_reaches_the_caller(
    make_llm: Callable[..., CacheCraftLLM],
) -> None:
    class BreakingEngine(SlowEngine):
        def _slowly(self, stream: AnswerStream) -> Generator[str, None, GenerationResult]:
            yield next(stream)
            raise MemoryError("no room")

    llm = make_llm(engine=BreakingEngine())
    messages = [ChatMessage(content="Hello")]
    with pytest.raises(MemoryError, match="no room"):
        await llm.acomplete("Hello")
    with pytest.raises(MemoryError, match="no room"):
        await llm.achat(messages)
    steps: AsyncIterator[Any] = await llm.astream_chat(messages)
    assert (await anext(steps)).delta
    with pytest.raises(MemoryError, match="no room"):
        await anext(steps)


async def _finished(engine: SlowEngine) -> None:
    assert await asyncio.to_thread(engine.is_finished.wait, 5)
    assert engine.num_steps > 0
