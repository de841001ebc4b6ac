"""One computation per key at a time."""

from __future__ import annotations

import threading

import pytest

from cachecraft_rag.single_flight import SingleFlight


def test_threads_that_ask_at_once_get_the_result_of_the_first() -> None:
    flight: SingleFlight[str, object] = SingleFlight()
    release, calls, found = threading.Event(), [], []

    def compute() -> object:
        calls.append(1)
        assert release.wait(10)
        return object()

    threads = [threading.Thread(target=lambda: found.append(flight.run("a", compute))) for _ in range(8)]
    for thread in threads:
        thread.start()
    while not calls:
        threading.Event().wait(0.001)
    release.set()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(value) for value in found}) == len(calls)


def test_other_keys_do_not_wait() -> None:
    flight: SingleFlight[str, int] = SingleFlight()
    assert flight.run("a", lambda: flight.run("b", lambda: 2)) == 2


def test_a_later_call_computes_again() -> None:
    flight: SingleFlight[str, int] = SingleFlight()
    assert [flight.run("a", lambda n=n: n) for n in (1, 2)] == [1, 2]


def test_an_error_reaches_those_who_wait_and_the_next_call_works() -> None:
    flight: SingleFlight[str, int] = SingleFlight()
    started, release = threading.Event(), threading.Event()
    errors: list[str] = []

    def fail() -> int:
        started.set()
        assert release.wait(10)
        raise MemoryError("full")

    def ask() -> None:
        try:
            flight.run("a", fail)
        except MemoryError as error:
            errors.append(str(error))

    first = threading.Thread(target=ask)
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=ask)
    second.start()
    release.set()
    first.join()
    second.join()
    assert errors == ["full", "full"]
    assert flight.run("a", lambda: 1) == 1
    with pytest.raises(MemoryError):
        flight.run("a", fail)
