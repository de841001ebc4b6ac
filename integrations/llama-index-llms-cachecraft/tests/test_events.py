"""What LlamaIndex's instrumentation sees: one pair of events per call, and plain data only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import ChatMessage
from pydantic import BaseModel

from llama_index.llms.cachecraft import CacheCraftLLM

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
async def test_no_tensor_can_be_reached_from_responses_and_events(method: str, llm: CacheCraftLLM, log: Any) -> None:
    responses = await call(llm, method)
    reached = [*reachable([responses, log.events])]
    assert len(reached) > 20
    assert not [thing for thing in reached if isinstance(thing, torch.Tensor | torch.nn.Module)]


def test_the_search_for_tensors_would_find_one() -> None:
    response = ChatMessage(content="Hello", additional_kwargs={"deep": [{"down": torch.ones(1)}]})
    assert any(isinstance(thing, torch.Tensor) for thing in reachable(response))


def reachable(root: Any) -> Iterator[Any]:
    """Everything that an object holds, through containers and attributes."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set):
            waiting += thing
        elif hasattr(thing, "__dict__") and not callable(thing):
            waiting += vars(thing).values()
            if isinstance(thing, BaseModel):
                waiting.append(thing.__pydantic_private__)
