"""What LlamaIndex's instrumentation sees: one pair of events per call, and plain data only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import ChatMessage

from llama_index.llms.cachecraft import CacheCraftLLM, CacheCraftPrefillEvent
from tests.conftest import passage
from tests.plain_data import count_alive

METHODS = (
    "complete",
    "acomplete",
    "stream_complete",
    "astream_complete",
    "chat",
    "achat",
    "stream_chat",
    "astream_chat",
)
every_method = pytest.mark.parametrize("method", METHODS)


async def call(llm: CacheCraftLLM, method: str) -> list[Any]:
    """Call a method by its name; its responses."""
    argument: Any = "Hello" if "complete" in method else [ChatMessage(content="Hello")]
    answer = getattr(llm, method)(argument)
    if method.startswith("a"):
        answer = await answer
    if method.startswith("astream"):
        return [step async for step in answer]
    return list(answer) if method.startswith("stream") else [answer]


@every_method
async def test_a_call_sends_one_start_and_one_end(method: str, llm: CacheCraftLLM, log: Any) -> None:
    responses = await call(llm, method)
    counts = Counter(type(event) for event in log.events if type(event).__name__.startswith("LLM"))
    completion = (LLMCompletionStartEvent, LLMCompletionInProgressEvent, LLMCompletionEndEvent)
    chat = (LLMChatStartEvent, LLMChatInProgressEvent, LLMChatEndEvent)
    start, progress, end = completion if "complete" in method else chat
    steps = {progress: len(responses)} if "stream" in method else {}
    assert counts == {start: 1, end: 1, **steps}
    [last] = log.of(end)
    assert last.response is responses[-1]
    assert last.response.raw["usage"]["completion_tokens"] == 8
    [first] = log.of(start)
    assert llm.model in first.model_dict.values()
    assert first.span_id == last.span_id


@every_method
async def test_a_call_is_one_event_of_the_callback_manager(method: str, llm: CacheCraftLLM) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])
    await call(llm, method)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1


@every_method
async def test_a_call_reports_its_statistics_once_within_its_span(method: str, llm: CacheCraftLLM, log: Any) -> None:
    [*_, last] = await call(llm, method)
    [event] = log.of(CacheCraftPrefillEvent)
    assert event.stats == last.raw["cachecraft"]
    assert event.model == llm.model
    [start] = log.of(LLMChatStartEvent, LLMCompletionStartEvent)
    assert event.span_id == start.span_id
    kinds = [type(one) for one in log.events]
    end = LLMCompletionEndEvent if "complete" in method else LLMChatEndEvent
    assert kinds.index(CacheCraftPrefillEvent) < kinds.index(end)
    assert json.loads(event.model_dump_json())["stats"] == event.stats


def test_a_stream_taken_after_its_span_reports_within_it(llm: CacheCraftLLM, log: Any) -> None:
    dispatcher = get_dispatcher("test")

    @dispatcher.span
    def ask() -> Any:
        return llm.stream_complete("Hello")

    for _ in ask():
        continue
    [start], [event] = log.of(LLMCompletionStartEvent), log.of(CacheCraftPrefillEvent)
    assert event.span_id == start.span_id is not None


def test_a_stream_that_is_left_reports_nothing(llm: CacheCraftLLM, log: Any) -> None:
    stream = llm.stream_complete("Hello")
    next(stream)
    stream.close()
    assert log.of(CacheCraftPrefillEvent) == []


@every_method
async def test_no_tensor_can_be_reached_from_responses_and_events(
    method: str, llm: CacheCraftLLM, log: Any, find_tensors: Callable[[Any], list[Any]]
) -> None:
    responses = await call(llm, method)
    assert log.of(CacheCraftPrefillEvent)
    assert find_tensors([responses, log.events]) == []


def test_the_search_for_tensors_would_find_one(llm: CacheCraftLLM, find_tensors: Callable[[Any], list[Any]]) -> None:
    response = ChatMessage(content="Hello", additional_kwargs={"deep": [{"down": torch.ones(1)}]})
    assert len(find_tensors(response)) == 1
    assert find_tensors({"held": [llm]})  # through private attributes, down to the weights


def test_a_thousand_requests_leave_memory_flat(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm(max_new_tokens=1)
    llm.engine.warm([passage(number) for number in range(5)])

    def ask(count: int) -> None:
        for number in range(count):
            question = f"{passage(number % 5)}\n\nQuestion {number % 7}?"
            list(llm.stream_complete(question)) if number % 2 else llm.chat([ChatMessage(content=question)])

    ask(100)
    before = count_alive()
    ask(1000)
    num_tensors, num_objects = count_alive()
    assert num_tensors <= before[0] + 50
    assert num_objects <= before[1] + 1000  # less than one per request
