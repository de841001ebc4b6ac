"""The async methods: the event loop stays free, calls run side by side, and cancelling ends the generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from cachecraft_rag import AnswerStream, CacheCraftEngine, GenerationResult
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.conftest import passage
from tests.loop_thread import longest_turn, no_garbage_collection
from tests.stepped_engine import WAIT_S, SteppedEngine
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

# No other test's chunks: what LlamaIndex retrieved once in a process is known to every LLM.
PROMPT = "\n\n".join(passage(number) for number in range(900, 906))
MESSAGES = [ChatMessage(content=PROMPT)]


@pytest.fixture
def stepped(make_llm: Callable[..., CacheCraftLLM]) -> tuple[CacheCraftLLM, SteppedEngine]:
    engine = SteppedEngine()
    return make_llm(engine=engine, max_new_tokens=40), engine


async def by_complete(llm: CacheCraftLLM) -> str:
    return (await llm.acomplete(PROMPT)).text


async def by_chat(llm: CacheCraftLLM) -> str:
    return str((await llm.achat(MESSAGES)).message.content)


async def by_complete_stream(llm: CacheCraftLLM) -> str:
    return "".join([step.delta or "" async for step in await llm.astream_complete(PROMPT)])


async def by_chat_stream(llm: CacheCraftLLM) -> str:
    return "".join([step.delta or "" async for step in await llm.astream_chat(MESSAGES)])


every_way = pytest.mark.parametrize("answer", [by_complete, by_chat, by_complete_stream, by_chat_stream])


@every_way
async def test_the_event_loop_runs_while_an_answer_is_computed(
    answer: Any, stepped: tuple[CacheCraftLLM, SteppedEngine]
) -> None:
    llm, engine = stepped
    task = asyncio.create_task(answer(llm))
    await engine.give_out(3)  # only a free loop gets here; with a blocked one nobody would allow the next piece
    assert not task.done()
    await engine.finish()
    assert await task == llm.complete(PROMPT).text


@every_way
async def test_the_event_loops_thread_is_busy_for_less_than_50_ms_at_a_time_while_two_calls_run(
    answer: Any, make_llm: Callable[..., CacheCraftLLM]
) -> None:
    llm = make_llm(max_new_tokens=60)
    await answer(llm)
    started = time.process_time()
    llm.complete(PROMPT)
    when_blocked = time.process_time() - started
    with no_garbage_collection():
        assert await longest_turn(answer(llm), answer(llm)) < min(0.05, when_blocked / 2)


async def test_calls_side_by_side_answer_like_calls_in_turn(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm()
    questions = [f"What ends in year {year}?" for year in range(2020, 2026)]
    in_turn = [llm.complete(question).text for question in questions]
    assert len(set(in_turn)) == len(questions)
    side_by_side = await asyncio.gather(*(llm.acomplete(question) for question in questions))
    assert [response.text for response in side_by_side] == in_turn


async def test_leaving_a_stream_ends_the_generation(stepped: tuple[CacheCraftLLM, SteppedEngine]) -> None:
    llm, engine = stepped
    engine.allowed.release(2)
    stream = await llm.astream_complete("Hello")
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    await engine.finish()
    assert engine.num_steps == 2


@every_way
async def test_cancelling_a_task_ends_the_generation_with_the_token_that_is_being_computed(
    answer: Any, stepped: tuple[CacheCraftLLM, SteppedEngine]
) -> None:
    llm, engine = stepped
    task = asyncio.create_task(answer(llm))
    await engine.give_out(2)
    await engine.enter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # at once: the third piece has not been given out
    await engine.finish()
    assert engine.num_steps == 3


def test_dropping_a_stream_ends_the_generation(stepped: tuple[CacheCraftLLM, SteppedEngine]) -> None:
    llm, engine = stepped
    engine.allowed.release(1000)
    for step in llm.stream_complete("Hello"):
        assert step.delta
        break
    assert engine.is_finished.wait(WAIT_S)
    assert engine.num_steps == 1


async def test_an_error_in_the_middle_of_an_answer_reaches_the_caller(
    make_llm: Callable[..., CacheCraftLLM],
) -> None:
    class BreakingEngine(CacheCraftEngine):
        def stream(self, *args: Any, **kwargs: Any) -> AnswerStream:
            return AnswerStream(self._break(super().stream(*args, **kwargs)))

        def _break(self, stream: AnswerStream) -> Generator[str, None, GenerationResult]:
            yield next(stream)
            raise MemoryError("no room")

    llm = make_llm(engine=BreakingEngine(make("llama"), byte_level()))
    with pytest.raises(MemoryError, match="no room"):
        await llm.acomplete("Hello")
    with pytest.raises(MemoryError, match="no room"):
        await llm.achat(MESSAGES)
    steps: AsyncIterator[Any] = await llm.astream_chat(MESSAGES)
    assert (await anext(steps)).delta
    with pytest.raises(MemoryError, match="no room"):
        await anext(steps)
