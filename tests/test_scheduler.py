"""Requests of many threads: together, in line, given up, and each with the answer it gets alone."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cachecraft_rag import CacheCraftEngine, GenerationResult
from cachecraft_rag.config import SchedulerConfig
from cachecraft_rag.errors import DeadlineExceededError, EngineBusyError
from cachecraft_rag.request import Request
from cachecraft_rag.steps import Steps
from tests.conftest import EngineMaker, passage, rag_prompt

WAIT_S = 30


class Gate:
    """Holds every prefill until it is opened, and remembers how many rows each decoding step had."""

    def __init__(self, engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.opened, self.entered = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.threads: set[str] = set()
        run, decode = engine._prefiller.run, engine._scheduler._runner._decode

        def held(request: Request, reuse: bool) -> None:
            self.threads.add(threading.current_thread().name)
            self.entered.set()
            assert self.opened.wait(WAIT_S), "nobody opened the gate"
            run(request, reuse)

        def counted(tickets: Any) -> None:
            self.sizes.append(len(tickets))
            decode(tickets)

        monkeypatch.setattr(engine._prefiller, "run", held)
        monkeypatch.setattr(engine._scheduler._runner, "_decode", counted)

    @property
    def num_open(self) -> int:
        return len(self.engine._scheduler._runner.open)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.002)


@pytest.fixture
def engine(make_engine: EngineMaker) -> CacheCraftEngine:
    engine = make_engine(scheduler=SchedulerConfig(max_waiting=3))
    engine.warm([passage(number) for number in range(6)])
    return engine


@pytest.fixture
def gate(engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(engine, monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def test_a_request_alone_runs_on_the_thread_that_asks(engine: CacheCraftEngine, gate: Gate) -> None:
    gate.opened.set()
    engine.generate(rag_prompt(1))
    engine.generate_batch([rag_prompt(1), rag_prompt(2)])
    list(engine.stream(rag_prompt(1)))
    assert gate.threads == {threading.current_thread().name}
    assert engine._scheduler._thread is None


def test_requests_of_several_threads_run_together_on_one(
    engine: CacheCraftEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    first = pool.submit(engine.generate, rag_prompt(1))
    assert gate.entered.wait(WAIT_S)
    others = [pool.submit(engine.generate, rag_prompt(number)) for number in (2, 3)]
    eventually(lambda: gate.num_open == 3)
    gate.threads.clear()
    gate.opened.set()
    for future in (first, *others):
        assert future.result(WAIT_S).stats.output_tokens == 8
    assert gate.threads == {"cachecraft-engine"}
    assert max(gate.sizes) == 3


def test_a_batch_is_decoded_together_in_order(engine: CacheCraftEngine, gate: Gate) -> None:
    gate.opened.set()
    prompts = [rag_prompt(number, number + 1) for number in range(5)]
    alone = [engine.generate(prompt) for prompt in prompts]
    gate.sizes.clear()
    results = engine.generate_batch(prompts)
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
    assert [result.text for result in results] == [result.text for result in alone]
    assert max(gate.sizes) == 5
    assert engine.generate_batch([]) == []


def test_32_threads_at_once_get_the_answers_of_single_runs(make_engine: EngineMaker, pool: ThreadPoolExecutor) -> None:
    engine = make_engine(max_new_tokens=6)
    engine.warm([passage(number) for number in range(6)])
    prompts = [rag_prompt(n % 6, (n + 1 + n // 6) % 6, question=f"Question {n}?") for n in range(32)]
    alone = [engine.generate(prompt).token_ids for prompt in prompts]

    def ask(number: int) -> GenerationResult:
        if number % 2:
            return engine.generate(prompts[number])
        stream = engine.stream(prompts[number])
        text = "".join(stream)
        assert text == stream.result.text
        return stream.result

    results = list(pool.map(ask, range(32)))
    assert [result.token_ids for result in results] == alone
    for stats in (result.stats for result in results):
        assert 0.0 <= stats.queue_s <= stats.ttft_s
    eventually(lambda: engine._in_flight.count == 0)


@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe", "gpt-neox", "gpt2"])
def test_other_architectures_answer_batches_as_they_answer_alone(name: str, make_engine: EngineMaker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpt2 is prefilled in full
        engine = make_engine(name)
    prompts = [rag_prompt(1, 2), rag_prompt(3), rag_prompt(2, 1)]
    engine.warm([passage(number) for number in (1, 2, 3)])
    alone = [engine.generate(prompt).token_ids for prompt in prompts]
    assert [result.token_ids for result in engine.generate_batch(prompts)] == alone


def test_a_full_line_says_its_limit_and_what_to_do(
    engine: CacheCraftEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    running = [pool.submit(engine.generate, rag_prompt(1))]
    assert gate.entered.wait(WAIT_S)
    for count in range(3):
        running.append(pool.submit(engine.generate, rag_prompt(2)))
        eventually(lambda count=count: gate.num_open == count + 2)  # type: ignore[misc]
    for ask in (
        engine.generate,
        lambda prompt: next(engine.stream(prompt)),
        lambda prompt: engine.generate_batch([prompt]),
    ):
        with pytest.raises(EngineBusyError, match=r"3 requests are waiting.*try again later.*max_waiting") as caught:
            ask(rag_prompt(3))
        assert caught.value.max_waiting == 3
    gate.opened.set()
    assert all(future.result(WAIT_S).stats.output_tokens == 8 for future in running)
    assert engine.generate(rag_prompt(3)).stats.output_tokens == 8


def test_time_in_line_counts_as_time_to_first_token(
    engine: CacheCraftEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    first = pool.submit(engine.generate, rag_prompt(1))
    assert gate.entered.wait(WAIT_S)
    second = pool.submit(engine.generate, rag_prompt(2))
    eventually(lambda: gate.num_open == 2)
    time.sleep(0.2)
    gate.opened.set()
    stats = second.result(WAIT_S).stats
    assert 0.2 <= stats.queue_s <= stats.ttft_s
    assert first.result(WAIT_S).stats.queue_s < 0.2


def test_a_stream_that_nobody_reads_takes_no_place(engine: CacheCraftEngine) -> None:
    stream = engine.stream(rag_prompt(1))
    assert not engine._scheduler._runner.open
    stream.close()


def test_closing_a_stream_ends_its_request_and_no_other(engine: CacheCraftEngine) -> None:
    first, second = engine.stream(rag_prompt(1), max_new_tokens=40), engine.stream(rag_prompt(2), max_new_tokens=40)
    next(first)
    next(second)
    first.close()
    eventually(lambda: len(engine._scheduler._runner.open) == 1)
    list(second)
    assert second.result.stats.output_tokens == 40


def test_streams_of_one_thread_may_be_read_in_turn(engine: CacheCraftEngine) -> None:
    alone = [engine.generate(rag_prompt(number), max_new_tokens=30).text for number in (1, 2)]
    streams = [engine.stream(rag_prompt(number), max_new_tokens=30) for number in (1, 2)]
    texts = ["", ""]
    for _ in range(40):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == alone


def test_a_request_alone_ends_when_its_time_is_over(engine: CacheCraftEngine) -> None:
    def read_slowly() -> None:
        stream = engine.stream(rag_prompt(1), timeout_s=0.2, max_new_tokens=2000)
        next(stream)
        time.sleep(0.2)  # however quick the model is, the answer ends later
        list(stream)

    with pytest.raises(DeadlineExceededError, match=r"timeout_s.*0\.2 s") as caught:
        read_slowly()
    assert isinstance(caught.value, TimeoutError)
    assert not engine._scheduler._runner.open


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_time_that_is_over_before_it_begins_is_an_error(timeout_s: float, engine: CacheCraftEngine) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        engine.generate(rag_prompt(1), timeout_s=timeout_s)


def test_a_batch_with_a_bad_prompt_computes_nothing(engine: CacheCraftEngine, gate: Gate) -> None:
    gate.opened.set()
    with pytest.raises(TypeError, match="RagPrompt"):
        engine.generate_batch([rag_prompt(1), "text"])  # type: ignore[list-item]
    assert not gate.entered.is_set()


def test_a_batch_gives_up_the_others_when_one_fails(engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine._prefiller.run

    def failing(request: Request, reuse: bool) -> None:
        if len(request.chunks) == 0 and len(request.encoded.spans) == 2:
            raise MemoryError("no room")
        run(request, reuse)

    monkeypatch.setattr(engine._prefiller, "run", failing)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate_batch([rag_prompt(1, 2), rag_prompt(3)])
    assert not engine._scheduler._runner.open
    assert engine._in_flight.count == 0


def test_closing_the_engine_ends_what_runs_and_what_waits(
    engine: CacheCraftEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    stream = engine.stream(rag_prompt(1), max_new_tokens=2000)
    gate.opened.set()
    next(stream)
    gate.opened.clear()
    gate.entered.clear()
    others = [pool.submit(engine.generate, rag_prompt(number)) for number in (2, 3)]
    assert gate.entered.wait(WAIT_S)
    eventually(lambda: gate.num_open == 3)
    closing = pool.submit(engine.close)
    gate.opened.set()
    closing.result(WAIT_S)
    for future in others:
        with pytest.raises(RuntimeError, match="the engine was closed before"):
            future.result(WAIT_S)
    with pytest.raises(RuntimeError, match="the engine was closed before"):
        list(stream)
    assert engine._scheduler._thread is None or not engine._scheduler._thread.is_alive()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.generate(rag_prompt(1))


def test_an_error_of_the_scheduler_itself_leaves_nobody_waiting(
    engine: CacheCraftEngine, gate: Gate, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = [pool.submit(engine.generate, rag_prompt(number)) for number in (1, 2)]
    eventually(lambda: gate.num_open == 2)
    admit = engine._scheduler._runner._admit
    monkeypatch.setattr(engine._scheduler._runner, "_admit", lambda: 1 / 0)
    gate.opened.set()
    for future in futures:
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            future.result(WAIT_S)
    monkeypatch.setattr(engine._scheduler._runner, "_admit", admit)
    assert engine.generate(rag_prompt(1)).stats.output_tokens == 8


async def test_tasks_decode_together_and_a_cancelled_one_ends_within_a_token(
    engine: CacheCraftEngine, gate: Gate
) -> None:
    gate.opened.set()
    taken = [0, 0]

    async def read(index: int, num_tokens: int) -> GenerationResult:
        stream = engine.stream(rag_prompt(index + 1), max_new_tokens=num_tokens)
        steps = Steps(stream)
        try:
            while await steps.take() is not None:
                taken[index] += 1
        finally:
            steps.close()
        return stream.result

    first, second = asyncio.create_task(read(0, 1500)), asyncio.create_task(read(1, 40))
    while min(taken) < 2:
        await asyncio.sleep(0.001)
    (ticket,) = (t for t in engine._scheduler._runner.open if t.request.sampling.max_new_tokens == 1500)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.to_thread(eventually, lambda: ticket not in engine._scheduler._runner.open)
    assert ticket.answer is not None
    drawn = len(ticket.answer._loop.token_ids)
    assert (await second).stats.output_tokens == 40
    assert len(ticket.answer._loop.token_ids) == drawn < 1500
    assert 2 in gate.sizes


def test_whoever_drops_a_stream_never_waits_for_the_store(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    settled: list[object] = []
    monkeypatch.setattr(engine.library, "settle", settled.append)
    stream = engine.stream(rag_prompt(1, 2))
    next(stream)
    stream.close()  # as a garbage collection does, on a thread that may hold the store's locks
    assert settled == []
    for _ in engine.stream(rag_prompt(1, 2)):
        continue
    assert len(settled) == 2  # its own, and before that the other's
