"""What LangChain's callbacks see of a call: one start and one end whatever way it takes, and plain data only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.errors import PromptTooLongError
from langchain_cachecraft import CacheCraftLLM, ChatCacheCraft
from tests.conftest import passage
from tests.plain_data import count_alive, find_tensors

QUESTION = f"{passage(1)}\n\nWhat ends first?"
CONFIG = dict[str, Any]
Way = Callable[[Any, CONFIG], Awaitable[list[Any]]]


class Log(BaseCallbackHandler):
    """Keeps all that LangChain reports of models."""

    run_inline = True

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seen: list[Any] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self._add("start", args, kwargs)

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self._add("start", args, kwargs)

    def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
        self._add("token", args, kwargs)

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self._add("end", args, kwargs)

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self._add("error", args, kwargs)

    def _add(self, name: str, *seen: Any) -> None:
        self.counts[name] += 1
        self.seen.append(seen)


async def _invoke(model: Any, config: CONFIG) -> list[Any]:
    return [model.invoke(QUESTION, config)]


async def _ainvoke(model: Any, config: CONFIG) -> list[Any]:
    return [await model.ainvoke(QUESTION, config)]


async def _stream(model: Any, config: CONFIG) -> list[Any]:
    return list(model.stream(QUESTION, config))


async def _astream(model: Any, config: CONFIG) -> list[Any]:
    return [chunk async for chunk in model.astream(QUESTION, config)]


async def _batch(model: Any, config: CONFIG) -> list[Any]:
    return model.batch([QUESTION, "hi", "ho"], config)


async def _abatch(model: Any, config: CONFIG) -> list[Any]:
    return await model.abatch([QUESTION, "hi", "ho"], config)


WAYS: dict[str, tuple[Way, int]] = {
    "invoke": (_invoke, 1),
    "ainvoke": (_ainvoke, 1),
    "stream": (_stream, 1),
    "astream": (_astream, 1),
    "batch": (_batch, 3),
    "abatch": (_abatch, 3),
}
every_model = pytest.mark.parametrize("kind", [ChatCacheCraft, CacheCraftLLM])


@every_model
@pytest.mark.parametrize(("way", "num_calls"), WAYS.values(), ids=WAYS)
async def test_a_call_is_one_start_and_one_end_and_holds_no_tensor(
    way: Way, num_calls: int, kind: Any, engine: CacheCraftEngine
) -> None:
    engine.warm([passage(1)])
    log = Log()
    answers = await way(kind(engine=engine), {"callbacks": [log]})
    num_tokens = len(answers) if way in (_stream, _astream) else 0
    assert log.counts == Counter(start=num_calls, end=num_calls, token=num_tokens)
    assert find_tensors([answers, log.seen]) == []


async def test_handlers_of_the_user_see_the_start_of_an_asynchronous_text_call(engine: CacheCraftEngine) -> None:
    log = Log()
    log.run_inline = False
    await CacheCraftLLM(engine=engine).ainvoke("hi", {"callbacks": [log]})
    assert log.counts == Counter(start=1, end=1)


@every_model
def test_a_call_that_fails_is_one_start_and_one_error(kind: Any, engine: CacheCraftEngine) -> None:
    log = Log()
    with pytest.raises(PromptTooLongError):
        kind(engine=engine).invoke(passage(1, num_sentences=200), {"callbacks": [log]})
    assert log.counts == Counter(start=1, error=1)


def test_the_search_for_tensors_would_find_one(engine: CacheCraftEngine) -> None:
    message = AIMessage("Hello", response_metadata={"deep": [{"down": torch.ones(1)}]})
    assert len(find_tensors(message)) == 1
    assert find_tensors({"held": [ChatCacheCraft(engine=engine)]})  # down to the weights


def test_a_thousand_requests_leave_memory_flat(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=1)
    engine.warm([passage(number) for number in range(5)])

    def ask(count: int) -> None:
        for number in range(count):
            question = f"{passage(number % 5)}\n\nQuestion {number % 7}?"
            list(chat.stream(question)) if number % 2 else chat.invoke([HumanMessage(question)])

    ask(100)
    before = count_alive()
    ask(1000)
    num_tensors, num_objects = count_alive()
    assert num_tensors <= before[0] + 50
    assert num_objects <= before[1] + 1000  # less than one per request
