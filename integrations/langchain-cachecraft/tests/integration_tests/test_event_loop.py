"""While an answer is computed the event loop goes on, and a cancelled call ends with the token it is at."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain_core.language_models import BaseLanguageModel

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft import CacheCraftLLM, ChatCacheCraft
from tests.conftest import passage
from tests.loop_thread import longest_turn, no_garbage_collection
from tests.stepped_engine import SteppedEngine
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

Model = BaseLanguageModel[Any]
PROMPT = "\n\n".join(passage(number) for number in range(9000, 9006))
"""No other test retrieves these texts: known chunks are measured after the first answer, and change the second."""


async def by_invoke(model: Model) -> str:
    return _text(await model.ainvoke(PROMPT))


async def by_stream(model: Model) -> str:
    return "".join([_text(chunk) async for chunk in model.astream(PROMPT)])


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


every_model = pytest.mark.parametrize("kind", [ChatCacheCraft, CacheCraftLLM])
every_way = pytest.mark.parametrize("answer", [by_invoke, by_stream])


@every_model
@every_way
async def test_the_event_loop_runs_while_an_answer_is_computed(answer: Any, kind: Any) -> None:
    with SteppedEngine() as engine:
        task = asyncio.create_task(answer(kind(engine=engine)))
        await engine.give_out(3)  # only a free loop gets here; with a blocked one nobody would allow the next piece
        assert not task.done()
        await engine.finish()
        assert await task == _text(kind(engine=engine).invoke(PROMPT))


@every_model
@every_way
async def test_the_event_loops_thread_is_busy_for_less_than_50_ms_at_a_time_while_two_calls_run(
    answer: Any, kind: Any
) -> None:
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=60)) as engine:
        model = kind(engine=engine)
        await answer(model)
        started = time.process_time()
        model.invoke(PROMPT)
        when_blocked = time.process_time() - started
        with no_garbage_collection():
            assert await longest_turn(answer(model), answer(model)) < min(0.05, when_blocked / 2)


@every_model
@every_way
async def test_cancelling_a_task_ends_the_generation_with_the_token_that_is_being_computed(
    answer: Any, kind: Any
) -> None:
    with SteppedEngine() as engine:
        task = asyncio.create_task(answer(kind(engine=engine)))
        await engine.give_out(2)
        await engine.enter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # at once: the third piece has not been given out
        await engine.finish()
        assert engine.num_steps == 3
