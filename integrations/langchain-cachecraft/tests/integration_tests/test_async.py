"""Asynchronous calls: the event loop stays free, and a cancelled call stops generating."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from cachecraft_rag import AnswerStream, CacheCraftEngine, EngineConfig, RagPrompt
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import Found, MemoryStore
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

WAIT_S = 20
QUESTION = f"{passage(1)}\n\nWhat ends first?"


class GatedStore(MemoryStore):
    """A store whose look-ups wait until the gate is opened: a prefill that takes as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(2**30, name="gated")
        self.gate, self.entered = threading.Event(), threading.Event()

    def find(self, key: ChunkKey) -> Found | None:
        self.entered.set()
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        return super().find(key)


class RecordingEngine(CacheCraftEngine):
    """Remembers its streams."""

    streams: list[AnswerStream]

    def stream(self, prompt: RagPrompt, **options: Any) -> AnswerStream:
        self.streams.append(super().stream(prompt, **options))
        return self.streams[-1]


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def engine(store: GatedStore) -> Iterator[RecordingEngine]:
    engine = RecordingEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=64), store)
    engine.streams = []
    engine.register([passage(1)])
    yield engine
    store.gate.set()
    engine.close()


@pytest.fixture
def chat(engine: RecordingEngine) -> ChatCacheCraft:
    return ChatCacheCraft(engine=engine, recompute_ratio=1.0)  # the same text whatever is stored already


async def answer_by_invoke(chat: ChatCacheCraft) -> str:
    return (await chat.ainvoke(QUESTION)).text


async def answer_by_stream(chat: ChatCacheCraft) -> str:
    return "".join([chunk.text async for chunk in chat.astream(QUESTION)])


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(WAIT_S * 100):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


ways = pytest.mark.parametrize("answer", [answer_by_invoke, answer_by_stream], ids=["ainvoke", "astream"])


def was_ended_early(stream: AnswerStream) -> bool:
    """Whether a stream was closed before its last token; one that is merely waiting would go on here."""
    left = list(stream)
    try:
        return left == [] and stream.result is None
    except RuntimeError:  # no result: it never got to its end
        return left == []


@ways
async def test_the_event_loop_runs_while_the_prompt_is_prefilled(
    answer: Any, chat: ChatCacheCraft, store: GatedStore
) -> None:
    task = asyncio.create_task(answer(chat))
    await asyncio.to_thread(store.entered.wait, WAIT_S)
    assert not task.done()
    store.gate.set()  # only a free loop gets here; a blocked one fails inside the store
    assert await task == chat.invoke(QUESTION).text


@ways
async def test_a_call_cancelled_during_prefill_stops_generating(
    answer: Any, chat: ChatCacheCraft, engine: RecordingEngine, store: GatedStore
) -> None:
    task = asyncio.create_task(answer(chat))
    await asyncio.to_thread(store.entered.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # at once, although the prefill still waits
    assert not store.gate.is_set()
    store.gate.set()
    (stream,) = engine.streams
    await eventually(lambda: not stream._deltas.gi_running)
    assert was_ended_early(stream)


async def test_a_stream_left_early_stops_generating(
    chat: ChatCacheCraft, engine: RecordingEngine, store: GatedStore
) -> None:
    store.gate.set()
    chunks = chat.astream(QUESTION)
    async for _ in chunks:
        break
    await chunks.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (stream,) = engine.streams
    assert was_ended_early(stream)


async def test_a_finished_stream_was_not_ended_early(
    chat: ChatCacheCraft, engine: RecordingEngine, store: GatedStore
) -> None:
    store.gate.set()
    await answer_by_stream(chat)
    assert not was_ended_early(engine.streams[0])


async def test_the_gate_of_these_tests_stops_a_blocking_call(chat: ChatCacheCraft, store: GatedStore) -> None:
    """Without this the other tests could pass for a store that nobody asks."""
    thread = threading.Thread(target=chat.invoke, args=(QUESTION,))
    thread.start()
    assert await asyncio.to_thread(store.entered.wait, WAIT_S)
    assert thread.is_alive()
    store.gate.set()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()


async def test_many_answers_at_once_equal_single_ones(chat: ChatCacheCraft, store: GatedStore) -> None:
    store.gate.set()
    questions = [f"{passage(1)}\n\nQuestion {number}?" for number in range(6)]
    expected = [chat.invoke(question).text for question in questions]
    answers = await asyncio.gather(*(chat.ainvoke(question) for question in questions))
    assert [found.text for found in answers] == expected


async def test_calls_at_the_same_time_are_decoded_together(
    chat: ChatCacheCraft, engine: RecordingEngine, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward_batch = engine._adapter.forward_batch

    def counting(token_ids: Any, *others: Any) -> Any:
        sizes.append(len(token_ids))
        return forward_batch(token_ids, *others)

    monkeypatch.setattr(engine._adapter, "forward_batch", counting)
    calls = asyncio.gather(*(chat.ainvoke(f"{passage(1)}\n\nQuestion {number}?") for number in range(3)))
    await asyncio.to_thread(store.entered.wait, WAIT_S)
    await eventually(lambda: len(engine._scheduler._runner.open) == 3)
    store.gate.set()
    await calls
    assert max(sizes) == 3


async def test_a_call_cancelled_in_line_leaves_it_at_once(
    chat: ChatCacheCraft, engine: RecordingEngine, store: GatedStore
) -> None:
    first = asyncio.create_task(chat.ainvoke(QUESTION))
    await asyncio.to_thread(store.entered.wait, WAIT_S)
    second = asyncio.create_task(chat.ainvoke(QUESTION))
    await eventually(lambda: len(engine._scheduler._runner.open) == 2)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    store.gate.set()
    assert (await first).text
    await eventually(lambda: not engine._scheduler._runner.open)
    with pytest.raises(RuntimeError, match="no result"):
        _ = engine.streams[1].result


async def test_errors_reach_the_caller(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match="temprature"):
        await chat.ainvoke("hi", temprature=0.5)
    with pytest.raises(ValueError, match="temprature"):
        await anext(chat.astream("hi", temprature=0.5))


async def test_parts_are_announced_before_they_are_given_out(chat: ChatCacheCraft) -> None:
    tokens: list[str] = []

    class Manager:
        async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            tokens.append(token)

    manager: Any = Manager()
    count = 0
    async for chunk in chat._astream([HumanMessage("hi")], run_manager=manager):
        assert tokens[count:] == [chunk.text]
        count += 1
    assert count > 2
