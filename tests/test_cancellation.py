"""Telling a request from another thread that nobody waits for it."""

from __future__ import annotations

import threading

from cachecraft_rag.cancellation import Cancellation, current_cancellation


def test_a_callback_is_called_once_whenever_it_comes() -> None:
    cancellation, calls = Cancellation(), []  # type: tuple[Cancellation, list[str]]
    cancellation.on_cancel(lambda: calls.append("early"))
    assert calls == []
    cancellation.cancel()
    cancellation.cancel()
    cancellation.on_cancel(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_it_is_found_inside_its_block_only() -> None:
    cancellation = Cancellation()
    assert current_cancellation() is None
    with cancellation.active():
        assert current_cancellation() is cancellation
        with Cancellation().active():
            assert current_cancellation() is not cancellation
        assert current_cancellation() is cancellation
    assert current_cancellation() is None


def test_another_thread_does_not_find_it() -> None:
    found: list[object] = []
    with Cancellation().active():
        thread = threading.Thread(target=lambda: found.append(current_cancellation()))
        thread.start()
        thread.join()
    assert found == [None]
