"""PyTorch's workers end with the work, or every other thread is slowed down by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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
