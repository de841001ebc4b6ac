"""PyTorch's workers end with the work, or every other thread is slowed down by them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cachecraft_rag import steps
from cachecraft_rag.request import Request
from cachecraft_rag.steps import Steps
from cachecraft_rag.thread_workers import release_workers
from tests.conftest import EngineMaker, passage, rag_prompt

TASKS = Path("/proc/self/task")

pytestmark = [
    pytest.mark.skipif(not release_workers(), reason="this PyTorch has no GNU OpenMP that can end workers"),
    pytest.mark.skipif(not TASKS.exists(), reason="threads can be counted on Linux only"),
    pytest.mark.usefixtures("two_threads"),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """One thread needs no workers, and the tests run with one where several processes share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def num_workers() -> int:
    """Threads of the process that are none of Python's."""
    return len(list(TASKS.iterdir())) - threading.active_count()


def tasks() -> set[int]:
    """Ids of all threads of the process."""
    return {int(task.name) for task in TASKS.iterdir()}


def new_workers(before: set[int]) -> set[int]:
    """Threads that came since then and are none of Python's; workers of earlier tests may still be going away."""
    return tasks() - before - {thread.native_id for thread in threading.enumerate()}


def compute() -> None:
    (torch.ones(400, 400) @ torch.ones(400, 400)).exp()


@pytest.fixture
def run_aside() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs something in a thread of its own that then stays alive."""
    done, threads = threading.Event(), []

    def run(work: Callable[[], object]) -> None:
        finished = threading.Event()

        def target() -> None:
            work()
            finished.set()
            done.wait()

        threads.append(threading.Thread(target=target))
        threads[-1].start()
        assert finished.wait(60)

    yield run
    done.set()
    for thread in threads:
        thread.join()


def test_a_thread_keeps_its_workers_until_they_are_released(run_aside: Callable[[Callable[[], object]], None]) -> None:
    before = num_workers()
    run_aside(compute)
    assert num_workers() == before + torch.get_num_threads() - 1
    run_aside(lambda: (compute(), release_workers()))
    assert num_workers() == before + torch.get_num_threads() - 1


def test_a_thread_computes_as_before_with_new_workers() -> None:
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    expected = x @ x
    release_workers()
    assert torch.equal(x @ x, expected)


def test_a_thread_that_was_answered_keeps_none(
    make_engine: EngineMaker, run_aside: Callable[[Callable[[], object]], None]
) -> None:
    engine = make_engine()
    before = num_workers()
    run_aside(lambda: engine.warm([passage(1)]))
    run_aside(lambda: (compute(), engine.generate(rag_prompt(1, 2))))
    run_aside(lambda: (compute(), list(engine.stream(rag_prompt(1, 3)))))
    assert num_workers() <= before  # fewer where this thread had some


def test_a_thread_that_another_one_took_over_from_keeps_none(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.warm([passage(number) for number in (1, 2, 3)])
    release_workers()
    run, begun, gates = engine._prefiller.run, [threading.Event(), threading.Event()], [threading.Event() for _ in "ab"]

    def held(request: Request, reuse: bool) -> None:
        number = sum(event.is_set() for event in begun)
        compute() if number == 0 else release_workers()  # the scheduler's thread may have drawn a token
        begun[number].set()
        assert gates[number].wait(60)
        run(request, reuse)

    monkeypatch.setattr(engine._prefiller, "run", held)
    with ThreadPoolExecutor(2) as pool:
        before = tasks()
        first = pool.submit(engine.generate, rag_prompt(1, 2))
        assert begun[0].wait(60)
        second = pool.submit(engine.generate, rag_prompt(2, 3))
        until = time.monotonic() + 60
        while engine._scheduler._thread is None:
            assert time.monotonic() < until, "the scheduler's thread never started"
        gates[0].set()  # the first thread ends its step, and waits for the other one from here on
        assert begun[1].wait(60)
        try:
            while new_workers(before):
                assert time.monotonic() < until, "workers of the first thread are still there"
                time.sleep(0.002)
        finally:
            gates[1].set()
        assert first.result().text != "" != second.result().text


def test_steps_of_an_event_loop_leave_none_to_its_thread_nor_to_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[int]] = []

    def pieces() -> Iterator[int]:
        found.append(new_workers(before))
        compute()
        yield 1

    async def ask() -> int | None:
        compute()
        return await Steps(pieces()).take()  # type: ignore[arg-type]

    release_workers()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(steps, "_workers", pool)
        before = tasks()
        assert asyncio.run(ask()) == 1
        assert [*found, new_workers(before)] == [set(), set()]
